"""Facts of the C side: read from a header, measured by the compiler; and the same of our tables.

A fact is something that both sides can state: the offset of a field, the value of an enumerator,
the spelling of a prototype. Whatever `measure` and the functions named ``our_...`` return is
compared as it stands.
"""

import ctypes
import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from pycomm.bindings._table import find_ctype, read_rows

TESTS = Path(__file__).parents[1]
FACTS = TESTS / "abi"
DEFINES = [
    # The switch of a function of nccl.h, and of an enumerator in older ones.
    "-DNCCL_OS_LINUX",
    "-D__CUDA_BF16_TYPES_EXIST__",
    # Headers that nccl.h includes without need, and that need others: as if included already.
    "-D__CUDA_FP16_H__",
    "-D__CUDA_BF16_H__",
    "-D__CUDA_FP8_H__",
]

# Two of C's basic types never look the same here; any other pointer is "pointer".
_KINDS = {
    ctypes.c_int: "int",
    ctypes.c_uint: "unsigned int",
    ctypes.c_size_t: "unsigned long",  # c_uint64 is the same object where long has 64 bits
    ctypes.c_float: "float",
    ctypes.c_char: "char",
    ctypes.c_char_p: "const char*",
    ctypes.c_void_p: "pointer",
}
_PRELUDE = """
#include <cuda.h>
#include <nccl.h>
#include <stddef.h>
#include <stdio.h>
#define KIND(x) _Generic((x), int: "int", unsigned int: "unsigned int", float: "float", \\
    unsigned long: "unsigned long", char*: "char", const char*: "const char*", default: "pointer")
#define SAME(f, ...) __builtin_types_compatible_p(__typeof__(&f), __typeof__(__VA_ARGS__))
int main(void) {
"""


@dataclass
class Declared:
    """The names in a header: what there is to measure."""

    functions: dict[str, str] = field(default_factory=dict)  # name: prototype
    structs: dict[str, list[str]] = field(default_factory=dict)  # name: paths of fields
    enums: dict[str, list[str]] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)


def compiler():
    """Return the C compiler, None where there is none."""
    return shutil.which("cc")


def package_folders(package):
    """Return the folders of a wheel of NVIDIA in this environment."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return list(map(Path, spec.submodule_search_locations or ())) if spec else []


def include_folders():
    """Return the folders of the official headers, from the wheels in this environment."""
    found = [TESTS / "doubles" / "include"]  # what the wheel of the runtime leaves out
    for package in ("nvidia.nccl", "nvidia.cuda_runtime"):
        found += [folder / "include" for folder in package_folders(package)]
    return [folder for folder in found if folder.is_dir()]


def compile_c(source, target, folders=(), *options):
    """Compile a file."""
    flags = [f"-I{folder}" for folder in folders]
    line = [compiler(), "-std=gnu11", "-w", *DEFINES, *flags, *options, "-o", target, source]
    answer = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr[:4000]


def run_c(text, folder, include):
    """Compile and run a program; return the lines it prints."""
    source, program = Path(folder, "facts.c"), Path(folder, "facts")
    source.write_text(_PRELUDE + text + "return 0; }\n")
    compile_c(source, program, include)
    answer = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    return answer.stdout.splitlines()


# Reading a header


def _preprocess(include, *options):
    flags = [f"-I{folder}" for folder in include]
    line = [compiler(), "-E", "-P", *DEFINES, *flags, *options, "-"]
    text = "#include <nccl.h>\n#include <cuda.h>\n"
    answer = subprocess.run(line, input=text, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr[:4000]
    return answer.stdout


def read_header(include, prefix):
    """Return what the headers in some folders declare under a prefix: ``nccl`` or ``cu``."""
    text = re.sub(r"__attribute__\s*\(\(.*?\)\)\s*(?=void)", "", _preprocess(include))
    declared = Declared()
    pattern = rf"(?<![\w*])((?:const\s+)?\w+[\s*]+)({prefix}[A-Z]\w*)\s*\(([^(){{}}]*)\)\s*;"
    for result, name, inside in re.findall(pattern, text):
        result = result.replace("typedef", "")
        [row] = read_rows({"": f"{result}{name}({inside});"})
        declared.functions[name] = row.prototype
    for kind, body, name in _typedefs(text):
        if not name.lower().startswith(prefix):
            continue
        if kind == "enum":
            members = [part.split("=")[0].strip() for part in body.split(",")]
            declared.enums[name] = [member for member in members if member]
        elif kind == "struct":
            declared.structs[name] = list(_fields(body))
    for line in _preprocess(include, "-dM").splitlines():
        match = re.fullmatch(rf"#define ({prefix.upper()}[A-Z]*_\w+) (.+)", line)
        # No initializers, no text, and not what DEFINES put there.
        if match and not match[2].startswith(("{", '"')) and f"-D{match[1]}" not in DEFINES:
            declared.constants.append(match[1])
    return declared


def _typedefs(text):
    """Yield (struct or enum, body, name) of every typedef with a body."""
    for match in re.finditer(r"typedef\s+(struct|enum)\s*\w*\s*\{", text):
        end = _closing(text, match.end())
        name = re.match(r"\s*(\w+)\s*;", text[end + 1 :])
        if name:
            yield match[1], text[match.end() : end], name[1]


def _closing(text, start):
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at
    raise ValueError("a brace that nothing closes")


def _fields(body, prefix=""):
    """Yield the fields of a struct; those of one inside it as path."""
    while body.strip():
        nested = re.match(r"\s*(?:struct|union)\s*\w*\s*\{", body)
        if nested:
            end = _closing(body, nested.end())
            name = re.match(r"\s*(\w*)[^;]*;", body[end + 1 :])
            inside = f"{prefix}{name[1]}." if name[1] else prefix
            yield from _fields(body[nested.end() : end], inside)
            body = body[end + 1 + name.end() :]
        else:
            one, _, body = body.partition(";")
            yield prefix + re.findall(r"\w+", one.split("[")[0])[-1]


# Measuring, and the same of our tables


def measure(declared, folder, include):
    """Return the facts of what is declared, as the compiler sees them."""
    out = []
    for name, paths in declared.structs.items():
        out.append(f'printf("structs|{name}||%zu\\n", sizeof({name}));')
        for path in paths:
            one = f"(({name}*)0)->{path}"
            out.append(
                f'printf("structs|{name}|{path}|[%zu, %zu, \\"%s\\"]\\n",'
                f" offsetof({name}, {path}), sizeof({one}), KIND({one}));"
            )
    for name, members in declared.enums.items():
        out += [f'printf("enums|{name}|{one}|%lld\\n", (long long){one});' for one in members]
    names = declared.constants
    out += [f'printf("constants||{name}|%lld\\n", (long long)({name}));' for name in names]
    facts = {"structs": {}, "enums": {}, "constants": {}, "functions": declared.functions}
    for line in run_c("\n".join(out), folder, include):
        group, name, path, value = line.split("|")
        place = facts[group].setdefault(name, {}) if name else facts[group]
        place[path] = json.loads(value)
    return facts


def struct_facts(kind):
    """Return size (under "") and fields of a structure of ours."""
    return {"": ctypes.sizeof(kind), **dict(_leaves(kind, "", 0))}


def _leaves(kind, prefix, base):
    for name, ctype in kind._fields_:
        at = base + getattr(kind, name).offset
        if issubclass(ctype, ctypes.Structure | ctypes.Union):
            yield from _leaves(ctype, f"{prefix}{name}.", at)
        else:
            element = ctype._type_ if issubclass(ctype, ctypes.Array) else ctype
            yield prefix + name, [at, ctypes.sizeof(ctype), _KINDS[element]]


def enum_facts(kind):
    """Return the members of an enumeration of ours, with their values."""
    return {name: int(member) for name, member in kind.__members__.items()}


def type_facts(kinds, folder, include):
    """Return (size, what it is passed as) of C types, as the compiler sees them."""
    classes = {1: "integer", 5: "pointer", 8: "real", 12: "struct"}
    out = "".join(
        f'printf("%zu|%d\\n", sizeof({kind}), __builtin_classify_type(*({kind}*)0));\n'
        for kind in kinds
    )
    lines = [line.split("|") for line in run_c(out, folder, include)]
    return {
        kind: (int(size), classes[int(code)])
        for kind, (size, code) in zip(kinds, lines, strict=True)
    }


def ctype_facts(kind, types):
    """Return (size, what it is passed as) of what stands for a C type in our tables."""
    ctype = find_ctype(kind, types)
    if issubclass(ctype, ctypes.Structure):
        passed = "struct"
    elif issubclass(ctype, (ctypes.c_void_p, ctypes.c_char_p, ctypes._Pointer, ctypes._CFuncPtr)):
        passed = "pointer"
    else:
        passed = "real" if ctype in (ctypes.c_float, ctypes.c_double) else "integer"
    return ctypes.sizeof(ctype), passed


def same_prototypes(prototypes, folder, include):
    """Return for each (function, prototype) whether the compiler takes the two for one type."""
    out = []
    for name, prototype in prototypes:
        # The prototype without its name is the type of a pointer to the function.
        pointer = re.sub(rf"\b{name}\(", "(*)(", prototype, count=1)
        out.append(f'printf("%d\\n", SAME({name}, ({pointer})0));')
    text = "\n".join(out).replace("SAME(", "SAME(")
    return [line == "1" for line in run_c(text, folder, include)]


def driver_versions(include):
    """Return for each function of the driver the versions in which it, or a new form, came."""
    found = {}
    for folder in include:
        file = folder / "cudaTypedefs.h"
        if file.is_file():
            for name, version in re.findall(r"\bPFN_(cu\w+?)_v(\d+)\w*\)", file.read_text()):
                found.setdefault(name, set()).add(int(version))
    return found
