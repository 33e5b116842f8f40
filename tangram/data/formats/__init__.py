"""From a record of any known format to a checked ``Conversation``."""
