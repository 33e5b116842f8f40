"""The chat templates that ship with Tangram.

- qwen2vl: ChatML with a default system prompt, as Qwen2-VL and Qwen2.5-VL have it; what a tool answered is a turn of the role ``tool``.
- qwen3_vl: ChatML without one, for models that think. Each answer without a thought gets an empty one, the earlier answers too (the chat
  template in Qwen3's files gives the last answer alone one, and takes the thoughts out of the earlier ones).
- qwen3_vl_nothink: the same for models that do not think; answers stand as they are.
- llava: the conversations of LLaVA-1.5 (version v1 of its code), for instruction tuning.
- llava_plain: its pre-training: pictures and their caption, nothing else.
- default: plain text that suits any vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tangram.data.conversation import IMAGE_PLACEHOLDER, Conversation
from tangram.data.template import MediaTokens, Piece, Template, register_template
from tangram.data.tokenizer import IMAGE, LLAVA_IMAGE, VIDEO, VISION_END, VISION_START
from tangram.data.tools import ToolTexts
from tangram.errors import DataError

QWEN_MEDIA = MediaTokens(image=IMAGE, video=VIDEO, start=VISION_START, end=VISION_END, others=("<|vision_pad|>",))

QWEN_TOOLS = ToolTexts(
    prompt="# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
)
"""As in the chat templates of Qwen2.5 and Qwen3."""

LLAVA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class CaptionTemplate(Template):
    """Pictures and the caption that is learnt. The text of the question is left out, as in LLaVA's own pre-training."""

    def turns(self, conversation: Conversation) -> list[list[Piece]]:
        """See ``ChatTemplate``.

        Raises:
            DataError: anything but one question with pictures and one caption.
        """
        question, *answers = conversation.messages
        pictures = "".join(re.findall(re.escape(IMAGE_PLACEHOLDER), question.content))
        roles = [message.role for message in conversation.messages]
        if roles != ["user", "assistant"] or not pictures or conversation.system is not None or conversation.tools is not None:
            raise DataError(
                f"{conversation.where}: the template {self.name} takes one question with pictures and one answer, without system prompt and tools; "
                f"got {len(roles)} messages with {len(conversation.images)} pictures; choose another template"
            )
        return [[Piece(pictures), Piece(self.answer + answers[0].content + self.answer_end, answer=True)]]


register_template(
    "qwen2vl",
    Template(
        system="<|im_start|>system\n{content}<|im_end|>\n",
        user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
        observation="<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n",
        answer_end="<|im_end|>",
        after_answer="\n",
        media=QWEN_MEDIA,
        default_system="You are a helpful assistant.",
        tools=QWEN_TOOLS,
    ),
)
QWEN3_VL = Template(
    system="<|im_start|>system\n{content}<|im_end|>\n",
    user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
    observation="<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    answer_end="<|im_end|>",
    after_answer="\n",
    media=replace(QWEN_MEDIA, timestamps=True),
    tools=QWEN_TOOLS,
)
register_template("qwen3_vl", replace(QWEN3_VL, thinks=True))
register_template("qwen3_vl_nothink", QWEN3_VL)

register_template(
    "llava",
    Template(
        system="{content} ",
        user="USER: {content} ASSISTANT:",
        answer=" ",
        answer_end="{eos_token}",
        media=MediaTokens(image=LLAVA_IMAGE),
        default_system=LLAVA_SYSTEM,
        begins_with_bos=True,
    ),
)
register_template("llava_plain", CaptionTemplate(system="", user="", answer_end="\n", media=MediaTokens(image=LLAVA_IMAGE), begins_with_bos=True))
register_template(
    "default",
    Template(
        system="System: {content}{eos_token}\n",
        user="Human: {content}{eos_token}\nAssistant:",
        answer_end="{eos_token}",
        after_answer="\n",
        begins_with_bos=True,
    ),
)
