"""Our tables against the official headers, and against what older versions of NCCL declare.

Everything is compared as facts (see `support.abi`), so every test of a fact has a second half that
flips each fact of ours, one at a time, and wants the comparison to turn red.
"""

import ctypes
import json
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from enum import IntEnum
from types import SimpleNamespace

import pytest
from support import abi

from pycomm.bindings import cuda as cuda_module
from pycomm.bindings import cuda_types, nccl_types
from pycomm.bindings import nccl as nccl_module
from pycomm.bindings._table import C_TYPES, read_rows

pytestmark = pytest.mark.skipif(abi.compiler() is None, reason="no C compiler `cc`")

ROWS = {
    "nccl": {row.name: row for row in read_rows(nccl_module.PROTOTYPES)},
    "cuda": {row.name: row for row in read_rows(cuda_module.PROTOTYPES)},
}
TYPES = {"nccl": nccl_types, "cuda": cuda_types}
RECORDED = [json.loads(path.read_text()) for path in sorted(abi.FACTS.glob("nccl-*.json"))]


def defined(module, base):
    """Return the classes of one kind that a module of ours defines, in its order."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == module.__name__
    }


def structs(module):
    # Those inside another have no name in the header, and are measured as part of the other.
    found = defined(module, ctypes.Structure)
    return {name: kind for name, kind in found.items() if not name.endswith("_key")}


def constants(module):
    """Return the #defines of a module; NULL is 0."""
    return {
        name: int(value or 0)
        for name, value in vars(module).items()
        if name.isupper() and name.startswith(("NCCL_", "CU_"))
    }


def known(version):
    """Return a version as numbers."""
    return tuple(map(int, version.split(".")))


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """Return the facts of both headers: all of nccl.h, and of cuda.h what we have."""
    include, folder = abi.include_folders(), tmp_path_factory.mktemp("abi")
    found = {"nccl": abi.measure(abi.read_header(include, "nccl"), folder, include)}
    both, own = abi.read_header(include, "cu"), structs(cuda_types)
    ours = abi.Declared(
        functions={name: both.functions.get(name) for name in ROWS["cuda"]},
        structs={name: [field[0] for field in kind._fields_] for name, kind in own.items()},
        enums={name: list(kind.__members__) for name, kind in defined(cuda_types, IntEnum).items()},
        constants=list(constants(cuda_types)),
    )
    found["cuda"] = abi.measure(ours, folder, include)
    found["declared"] = both
    return SimpleNamespace(**found, folder=folder, include=include)


class TestStructs:
    @pytest.mark.parametrize("library", ["nccl", "cuda"])
    def test_all_are_as_in_the_header(self, header, library):
        ours = {name: abi.struct_facts(kind) for name, kind in structs(TYPES[library]).items()}
        assert ours == getattr(header, library)["structs"]

    def test_any_other_type_order_or_omission_is_seen(self, header):
        other = {
            c_int: c_uint, c_uint: c_int, c_size_t: c_void_p, c_void_p: c_size_t,
            c_char_p: c_void_p, c_float: c_int,
        }  # fmt: skip
        tried = 0
        for library, module in TYPES.items():
            for name, kind in structs(module).items():
                truth = getattr(header, library)["structs"][name]
                fields = list(kind._fields_)
                mutants = []
                for at, (field, ctype, *_) in enumerate(fields):
                    changed = other.get(ctype, ctypes.c_byte * 64)
                    mutants.append([*fields[:at], (field, changed), *fields[at + 1 :]])
                    mutants.append([*fields[:at], (field + "_", ctype), *fields[at + 1 :]])
                    mutants.append(fields[:at] + fields[at + 1 :])
                    if at:
                        mutants.append(
                            [*fields[: at - 1], fields[at], fields[at - 1], *fields[at + 1 :]]
                        )
                for mutant in mutants:
                    made = type(name, (ctypes.Structure,), {"_fields_": mutant})
                    assert facts_or_error(made) != truth, (name, mutant)
                    tried += 1
        assert tried > 200

    def test_initializers_are_those_of_the_header(self, header):
        made = {
            "NCCL_CONFIG_INITIALIZER": nccl_types.config(),
            "NCCL_COLLCONFIG_INITIALIZER": nccl_types.coll_config(),
            "NCCL_SIM_INFO_INITIALIZER": nccl_types.sim_info(),
            "NCCL_ENCRYPTION_CONFIG_INITIALIZER": nccl_types.encryption_config(),
        }
        text = "".join(
            # Static: what lies between the fields is zero, as in ctypes.
            f"{{ static {type(ours).__name__} it = {name};\n"
            ' for (size_t i = 0; i < sizeof it; i++) printf("%02x", ((unsigned char*)&it)[i]);\n'
            ' printf("\\n"); }\n'
            for name, ours in made.items()
        )
        lines = abi.run_c(text, header.folder, header.include)
        assert lines == [bytes(ours).hex() for ours in made.values()]

    def test_a_field_that_is_not_there_is_refused(self):
        assert nccl_types.config(blocking=0, commName=b"x").commName == b"x"
        with pytest.raises(AttributeError, match="ncclConfig_t has no field nonblocking"):
            nccl_types.config(nonblocking=1)


def facts_or_error(kind):
    try:
        return abi.struct_facts(kind)
    except KeyError:  # a type that no field of the header has
        return None


class TestNumbers:
    @pytest.mark.parametrize("library", ["nccl", "cuda"])
    def test_enumerations(self, header, library):
        enums = defined(TYPES[library], IntEnum)
        ours = {name: abi.enum_facts(kind) for name, kind in enums.items()}
        truth = getattr(header, library)["enums"]
        assert ours == truth
        for name, members in ours.items():
            for member, value in members.items():
                assert {**members, member: value + 1} != truth[name]

    def test_every_result_of_the_driver_is_there(self, header):
        members = header.declared.enums["CUresult"]
        assert set(members) == set(cuda_types.CUresult.__members__)

    @pytest.mark.parametrize("library", ["nccl", "cuda"])
    def test_constants(self, header, library):
        ours, truth = constants(TYPES[library]), getattr(header, library)["constants"]
        assert ours == truth
        for name, value in ours.items():
            assert {**ours, name: value + 1} != truth


class TestPrototypes:
    @pytest.mark.parametrize("library", ["nccl", "cuda"])
    def test_the_spelling_is_that_of_the_header(self, header, library):
        """Names of parameters too: two of one type that change places are seen here only."""
        ours = {name: row.prototype for name, row in ROWS[library].items()}
        assert ours == getattr(header, library)["functions"]

    @pytest.mark.parametrize("library", ["nccl", "cuda"])
    def test_the_compiler_takes_them_for_the_same(self, header, library):
        rows = ROWS[library].values()
        pairs = [(row.name, row.prototype) for row in rows]
        mutants = [(row.name, text) for row in rows for text in changed(row)]
        answers = abi.same_prototypes(pairs + mutants, header.folder, header.include)
        assert all(answers[: len(pairs)])
        passed = [m for m, same in zip(mutants, answers[len(pairs) :], strict=True) if same]
        assert not passed
        assert len(mutants) > 500

    @pytest.mark.parametrize("library", ["nccl", "cuda"])
    def test_what_stands_for_each_type_is_passed_alike(self, header, library):
        types = TYPES[library].TYPES
        kinds = {kind for row in ROWS[library].values() for kind, _ in row.parameters}
        kinds |= {row.result for row in ROWS[library].values()} - {"void"}
        truth = abi.type_facts(sorted(kinds), header.folder, header.include)
        assert {kind: abi.ctype_facts(kind, types) for kind in kinds} == truth
        narrow, wide = ctypes.c_short, ctypes.c_char * 3
        for kind in kinds & {*types, *C_TYPES}:
            for wrong in (narrow, wide):
                with pytest.raises(AssertionError):
                    assert abi.ctype_facts(kind, {**types, kind: wrong}) == truth[kind]


def changed(row):
    """Yield prototypes that differ from a row in one type: another one, none, or a place."""
    kinds = [kind for kind, _ in row.parameters]
    name = row.name
    for at, kind in enumerate(kinds):
        for wrong in other_types(kind):
            yield f"{row.result} {name}({', '.join([*kinds[:at], wrong, *kinds[at + 1 :]])})"
        yield f"{row.result} {name}({', '.join(kinds[:at] + kinds[at + 1 :]) or 'void'})"
        before = kinds[at - 1]
        # Two spellings of one type (a handle takes no notice of const) are one to the compiler.
        if at and bare(before) != bare(kind):
            swapped = [*kinds[: at - 1], kind, before, *kinds[at + 1 :]]
            yield f"{row.result} {name}({', '.join(swapped)})"
    wrong = "double" if row.result != "double" else "int"
    yield f"{wrong} {name}({', '.join(kinds) or 'void'})"


def bare(kind):
    return "int" if kind == "CUdevice" else kind.removeprefix("const ")


def other_types(kind):
    yield "double"
    if kind.endswith("*"):
        yield "long"
        yield kind.removeprefix("const ") if kind.startswith("const ") else f"const {kind}"
        yield kind + "*"
    else:
        yield {"int": "unsigned int", "unsigned int": "int", "size_t": "long"}.get(kind, "char")


@pytest.mark.parametrize("old", RECORDED, ids=lambda old: old["version"])
class TestOlderVersions:
    """Facts recorded from the headers and libraries of older wheels (scripts/record-abi)."""

    def test_functions_are_there_from_their_first_version_on(self, old):
        ours = {
            name: row.prototype
            for name, row in ROWS["nccl"].items()
            if known(row.since) <= known(old["version"])
        }
        assert ours == old["functions"]
        assert set(ours) <= set(old["exported"])

    def test_structs_are_the_beginning_of_ours(self, old):
        mine = structs(nccl_types)
        for name, facts in old["structs"].items():
            ours = abi.struct_facts(mine[name])
            assert facts[""] <= ours[""]
            facts = {path: fact for path, fact in facts.items() if path}
            assert facts == {path: ours[path] for path in facts}
            end = max(at + nbytes for at, nbytes, _ in facts.values())
            lacking = set(ours) - set(facts) - {""}
            assert all(ours[path][0] >= end for path in lacking)
            for path in facts:
                assert known(nccl_types.SINCE.get(f"{name}.{path}", "2.0")) <= known(old["version"])
            for path in lacking:
                assert known(nccl_types.SINCE[f"{name}.{path}"]) > known(old["version"])

    def test_enumerators_and_constants(self, old):
        counts = ("ncclNumTypes", "ncclNumResults")  # they grow
        enums = defined(nccl_types, IntEnum)
        for name, members in old["enums"].items():
            ours = abi.enum_facts(enums[name])
            for member, value in members.items():
                assert member in counts or ours[member] == value
            for member in set(ours) - set(members):
                assert known(nccl_types.SINCE[member]) > known(old["version"])
            for member in members:
                assert known(nccl_types.SINCE.get(member, "2.0")) <= known(old["version"])
        ours = constants(nccl_types)
        own = ("NCCL_MINOR", "NCCL_PATCH", "NCCL_VERSION_CODE")
        for name, value in old["constants"].items():
            assert name in own or ours[name] == value


def test_facts_of_older_versions_are_there():
    assert len(RECORDED) >= 2


def test_first_versions_of_the_driver(header):
    """The versioned types of cudaTypedefs.h say when a function, or its new form, came."""
    names = abi.driver_versions(header.include)
    for name, row in ROWS["cuda"].items():
        major, minor = known(row.since)
        plain = name.removesuffix("_v2")
        assert major * 1000 + minor * 10 in names[plain], name
        if plain == name:
            assert major * 1000 + minor * 10 == min(names[plain])
