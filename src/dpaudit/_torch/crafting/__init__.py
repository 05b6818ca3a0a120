"""Input canaries as examples: from their descriptions, a model and examples that are held out."""

from dpaudit._torch.crafting._craft import Crafting, Examples
from dpaudit._torch.crafting._domain import Domain
from dpaudit._torch.crafting._search import Tell, nobody

__all__ = ["Crafting", "Domain", "Examples", "Tell", "nobody"]
