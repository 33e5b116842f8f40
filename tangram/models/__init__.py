"""The assembled vision-language model, built of megatron-core's layers."""
