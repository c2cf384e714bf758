"""The examples of the documents, loaded by path."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def load_train() -> Callable[..., Any]:
    """Return the function `train` of train_digits.py."""
    pytest.importorskip("sklearn", reason="the example reads its data from scikit-learn")
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLES / "train_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train  # type: ignore[no-any-return]
