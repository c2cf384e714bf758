"""The family of errors: what catches what, and what survives a pickle."""

import pickle

import pytest

import pycomm
from pycomm import errors


def test_catching() -> None:
    assert issubclass(errors.CommTimeoutError, TimeoutError)
    for name in ("MPIError", "MismatchError", "PeerError", "CommTimeoutError"):
        assert issubclass(getattr(errors, name), errors.CommError)
    assert issubclass(errors.CommError, RuntimeError)
    assert issubclass(errors.ArgumentValueError, ValueError)
    assert issubclass(errors.ArgumentTypeError, TypeError)
    assert not issubclass(errors.ArgumentValueError, errors.CommError)


@pytest.mark.parametrize("name", errors.__all__)
def test_pickle_keeps_message_and_facts(name: str) -> None:
    error = getattr(errors, name)("what happened")
    if isinstance(error, errors.CommError):
        error.operation, error.sequence, error.rank = "all_reduce", 7, 2
    if isinstance(error, errors.CommTimeoutError):
        error.missing, error.timeout = (1, 3), 2.5
    if isinstance(error, errors.PeerError):
        error.peers = (1,)
    if isinstance(error, errors.MPIError):
        error.code, error.error_class = 123, 75
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "what happened"
    assert vars(copy) == vars(error)


def test_all_are_public() -> None:
    for name in errors.__all__:
        assert getattr(pycomm, name) is getattr(errors, name)
        assert name in pycomm.__all__
