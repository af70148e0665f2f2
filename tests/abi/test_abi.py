"""The header only grows within a MINOR version, libscope.so exports what it declares, and _c_api.py says the same."""
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "scope_attn"))
import _c_api as api


class Header:
    """Functions, enumerators, and the declarations and field names of each struct, as text."""

    def __init__(self, path):
        text = re.sub(r"/\*.*?\*/", " ", pathlib.Path(path).read_text(), flags=re.S)
        one_line = lambda x: " ".join(x.split())
        self.path = path
        self.functions = {re.search(r"(\w+)\(", d)[1]: one_line(d) for d in re.findall(r"^SCOPE_API\s([^;]+);", text, re.M)}
        self.values = dict(re.findall(r"(SCOPE_\w+) = (-?\d+)", text))
        self.minor = re.findall(r"SCOPE_VERSION_(?:MAJOR|MINOR) (\d+)", text)
        self.structs = {name: [one_line(d) for d in body.split(";") if d.strip()]
                        for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.S)}
        self.fields = {name: [re.match(r"\w+", x.strip(" *"))[0] for d in declarations
                              for x in re.sub(r"^(const )?\w+\b", "", d).split(",")]
                       for name, declarations in self.structs.items()}

    def offsets(self, fields, compiler):
        """{struct: [(field, offset, size)]} as the compiler lays them out, with ("-", sizeof, 0) at the end."""
        lines = [f'printf("{s} {f} %zu %zu\\n", offsetof({s}, {f}), sizeof((({s}*)0)->{f}));' for s in fields for f in fields[s]]
        lines += [f'printf("{s} - %zu 0\\n", sizeof({s}));' for s in fields]
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
            source.write_text("#include <stdio.h>\n" + f'#include "{pathlib.Path(self.path).resolve()}"\n' + "int main(void) {\n" +
                              "\n".join(lines) + "\nreturn 0;\n}\n")
            subprocess.run([compiler, "-std=c11", "-o", program, source], check=True)
            output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        found = {name: [] for name in fields}
        for line in output.splitlines():
            struct, field, offset, size = line.split()
            found[struct].append((field, int(offset), int(size)))
        return found


@pytest.fixture(scope="module")
def frozen(repository):
    return Header(repository / "tests" / "abi" / "scope_0_2.h")


@pytest.fixture(scope="module")
def current(repository):
    return Header(repository / "include" / "scope" / "scope.h")


def test_functions_and_enumerators_are_as_they_were(frozen, current):
    assert current.minor == frozen.minor, "MINOR has changed: freeze its header (docs/reference/abi.md)"
    for name, declaration in frozen.functions.items():
        assert current.functions.get(name) == declaration, f"{name} was: {declaration}; is: {current.functions.get(name)}"
    for name, value in frozen.values.items():
        assert current.values.get(name) == value, f"{name} was {value}, is {current.values.get(name)}"


def test_structs_only_grow(frozen, current, compiler):
    """Every field is where it was, in this compiler's layout: the frozen header's list, through both headers."""
    was, now = frozen.offsets(frozen.fields, compiler), current.offsets(frozen.fields, compiler)
    for name, declarations in frozen.structs.items():
        assert current.structs[name][:len(declarations)] == declarations, f"{name} has changed before its end"
        assert now[name][:-1] == was[name][:-1], f"{name}: {set(was[name]) ^ set(now[name])}"
        assert now[name][-1][1] >= was[name][-1][1], f"{name} has shrunk"
        grows = frozen.fields[name][0] == "struct_size"
        assert grows or now[name] == was[name], f"{name} has no struct_size, and cannot grow"


def test_the_library_exports_what_the_header_declares(current, library):
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout.splitlines()
    exported = {line.split()[-1] for line in lines}
    assert exported == set(current.functions), f"exported but not declared, or not exported: {exported ^ set(current.functions)}"


def test_ctypes_knows_the_same_functions(current):
    assert {f"scope_{name}" for name, _, _ in api.prototypes()} == set(current.functions)
    for name, _, arguments in api.prototypes():
        declared = current.functions[f"scope_{name}"]
        inside = declared[declared.index("(") + 1:-1]
        assert len(arguments) == (0 if inside == "void" else inside.count(",") + 1), declared


def test_ctypes_knows_the_same_structs(current, compiler):
    """By another hand."""
    for name, fields in current.offsets(current.fields, compiler).items():
        last, end = fields[-2:]
        assert last[1] + last[2] == end[1], f"{name} ends in padding, where a new field would find garbage"
        kind = getattr(api, "".join(part.capitalize() for part in name.split("_")[1:]))
        mine = [(field, getattr(kind, field).offset, getattr(kind, field).size) for field, _ in kind._fields_]
        mine.append(("-", ctypes.sizeof(kind), 0))
        assert mine == fields, f"_c_api.{kind.__name__}: {set(mine) ^ set(fields)}"
