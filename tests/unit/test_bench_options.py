import pytest

from pycomm.bench.cases import CASES, find_case
from pycomm.bench.options import Stop, parse, parse_size


def refused(*argv):
    with pytest.raises(Stop) as caught:
        parse(argv)
    assert caught.value.code == 2
    return caught.value.text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("8", 8),
        ("1k", 1024),
        ("64K", 65536),
        ("1.5M", 1572864),
        ("32m", 33554432),
        ("2G", 2147483648),
    ],
)
def test_sizes_have_binary_suffixes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "8 K", "-8", "1e3", "8Ki", "8T", "nan", "٣"])
def test_what_is_not_a_size_is_refused(text):
    # "=" keeps argparse from taking a leading minus for a flag.
    assert "is not a size" in refused("all_reduce", f"--minbytes={text}")


def test_defaults_are_those_of_nccl_tests():
    options = parse(["all_reduce"])
    assert (options.minbytes, options.maxbytes, options.stepbytes) == (32 << 20, 32 << 20, 1 << 20)
    assert options.stepfactor is None
    assert (options.iters, options.warmup_iters, options.agg_iters, options.check) == (20, 1, 1, 1)
    assert [(dtype.name, op) for dtype, op in options.combinations] == [("float32", "sum")]
    assert (options.root, options.average, options.blocking) == (0, 1, 0)
    assert list(options.sizes()) == [32 << 20]


def test_steps_multiply_or_add():
    assert list(parse(["all_reduce", "-b", "8", "-e", "1K", "-f", "4"]).sizes()) == [
        8,
        32,
        128,
        512,
    ]
    assert list(parse(["all_reduce", "-b", "8", "-e", "20", "-i", "6"]).sizes()) == [8, 14, 20]
    assert list(parse(["all_reduce", "-b", "8", "-e", "8", "-i", "0"]).sizes()) == [8]
    assert list(parse(["barrier", "-b", "8", "-e", "1K", "-f", "4"]).sizes()) == [0]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("alltoall", "all_to_all"),
        ("sendrecv", "send_recv"),
        ("AllReduce", "all_reduce"),
        ("all_reduce_perf", "all_reduce"),
        ("reduce-scatter", "reduce_scatter"),
        ("bcast", "broadcast"),
    ],
)
def test_other_spellings_of_collectives(spelling, name):
    assert find_case(spelling) is CASES[name]


def test_unknown_collective_names_the_known_ones():
    assert "known: all_reduce, reduce_scatter" in refused("all_redice")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float", "float32"),
        ("double", "float64"),
        ("half", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("complex64", "complex64"),
        ("i2", "int16"),
    ],
)
def test_datatypes_by_the_names_of_nccl_and_numpy(name, dtype):
    assert parse(["all_reduce", "-d", name]).combinations[0][0].name == dtype


def test_all_runs_what_has_a_meaning():
    options = parse(["all_reduce", "-d", "all", "-o", "all"])
    combinations = [(dtype.name, op) for dtype, op in options.combinations]
    assert len(combinations) == 60  # ten types that add, six operations
    assert ("bfloat16", "mulsum") in combinations
    assert not any(name.startswith("float8") for name, _ in combinations)
    moved = parse(["all_gather", "-d", "all", "-o", "all"]).combinations
    assert len(moved) == 12
    assert {op for _, op in moved} == {None}


def test_an_operation_without_meaning_is_refused():
    assert "it can be moved, not reduced" in refused("all_reduce", "-d", "f8e4m3")
    assert parse(["all_gather", "-d", "f8e4m3"]).combinations[0][0].name == "float8_e4m3"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-b", "2K", "-e", "1K"], "2048 is more than the largest size, 1024"),
        (["-b", "0", "-e", "8", "-f", "2"], "0 cannot be multiplied up"),
        (["-b", "4", "-e", "8", "-i", "0"], "0 never reaches the largest size"),
        (["-f", "1"], "1 is less than 2"),
        (["-i", "4", "-f", "2"], "not allowed with argument"),
        (["-n", "0"], "0 is less than 1"),
        (["-c", "-1"], "-1 is less than 0"),
        (["-o", "xor"], "invalid choice: 'xor'"),
        (["-d", "int128"], "argument -d/--datatype"),
        (["-d", ">f4"], "byte order of another machine"),
        (["-r", "-1"], "-1 is less than 0"),
        (["-a", "4"], "invalid choice: 4"),
        (["-T", "nan"], "not a positive number of seconds"),
        (["-t", "2"], "only 1 is possible here: a rank is one process with host memory"),
        (["-g", "8"], "only 1 is possible here"),
        (["-R", "3"], "invalid choice"),
        (["--compression", "zip"], "'zip' is unknown; known: none, bf16"),
        (["--compare", "mpi4py,nccl"], "'nccl' is unknown; known: mpi4py, gloo"),
        (["--compare", "mpi4py", "-m", "2"], "leave out -m"),
        (["--format", "osu", "--algorithm", "auto,native"], "show one algorithm"),
        (["--minbyte", "8"], "unrecognized arguments: --minbyte"),
        (["-N", "1"], "unrecognized arguments: -N"),
    ],
)
def test_refusals_say_why(argv, says):
    assert says in refused("all_reduce", *argv)


def test_flags_that_fit_no_collective():
    assert "send_recv has one algorithm only" in refused("send_recv", "--algorithm", "native")
    assert "barrier has no sizes to draw" in refused("barrier", "--plot", "x.png")


def test_one_thread_and_one_device_are_accepted_in_silence():
    argv = ["all_reduce", "-t", "1", "-g", "1", "-G", "0", "-C", "0", "-R", "0"]
    assert parse(argv).case.name == "all_reduce"


def test_help_ends_with_code_0_and_lists_the_flags():
    with pytest.raises(Stop) as caught:
        parse(["-h"])
    assert caught.value.code == 0
    for flag in ("--minbytes", "--stepfactor", "--agg_iters", "--compare", "--csv", "--plot"):
        assert flag in caught.value.text


def test_registered_memory_by_two_names():
    assert not parse(["all_reduce", "-R", "0"]).registered
    for flags in (["-R", "1"], ["-R", "2"], ["--registered"]):
        assert parse(["all_reduce", *flags]).registered
