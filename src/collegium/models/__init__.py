"""Networks: building one by name, and the roles of its tensors."""

from collegium.core.model_parts import ModelParts, find_parts
from collegium.models.factory import MODELS, build_model

__all__ = ["MODELS", "ModelParts", "build_model", "find_parts"]
