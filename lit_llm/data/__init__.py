"""Data: chats from files or from the standard library, tokenised once, packed, in an order that resumes exactly."""

from lit_llm.data.python_docs import PythonDocs
from lit_llm.data.sft import PackedSFTDataModule
from lit_llm.data.sources import ChatSource

__all__ = ["ChatSource", "PackedSFTDataModule", "PythonDocs"]
