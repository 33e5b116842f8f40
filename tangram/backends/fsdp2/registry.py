"""What plug-ins of this backend register: model classes and datasets, under the ids that run files name."""

from tangram.families.registry import Register, data_register, model_register

__all__ = ["Register", "data_register", "model_register"]
