"""Networks: building one by name, and which of its tensors play which part."""

from collegium.models.factory import MODELS, build_model
from collegium.models.parts import ModelParts, find_parts

__all__ = ["MODELS", "ModelParts", "build_model", "find_parts"]
