"""Programs of other chips: the options they are compiled by, and XLA's prediction, also beside a trace."""

import dataclasses
import gzip
import importlib
import json
import types
from pathlib import Path

import jax
import pytest
import yaml
from hlo_texts import HEAD
from traces import written

from bench.plan import compilers, exchanges, programs, schedules, trainers
from shardwright.cluster.chips import chip_of
from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.plan.work import Op
from shardwright.run.compiling import with_mesh
from shardwright.tools.chip import kernels
from shardwright.tools.chip.clock import Clock, attention_matmuls

US = 1e-6
COST = ', backend_config={{"reification_cost":[{{"exec_time_us":9,"name":""}},{{"exec_time_us":{},"name":"sol"}}]}}'
AT = ', metadata={{op_name="jit(f)/{}" stack_frame_id={}}}'
GEMM = (
    'custom-call(%{}, %{}), custom_call_target="__cublas$lt$matmul", backend_config={{{{"gemm_backend_config":'
    '{{{{"dot_dimension_numbers":{{{{"lhs_contracting_dimensions":["{}"],"rhs_contracting_dimensions":["{}"],'
    '"lhs_batch_dimensions":[{}],"rhs_batch_dimensions":[{}]}}}}}}}},"reification_cost":[{{{{"exec_time_us":{{}}}}}}]}}}}'
)
PRODUCT = GEMM.format("x", "x", 1, 0, "", "")
BATCHED = GEMM.format("b", "b", 2, 1, '"0"', '"0"')
ALL = "replica_groups={{0,1,2,3}}"
TEXT = f"""{HEAD}%f (p: f32[4,4]) -> f32[4,4] {{
  %p = f32[4,4]{{1,0}} parameter(0)
  ROOT %n = f32[4,4]{{1,0}} negate(%p)
}}

%cond (c.5: f32[4,4]) -> pred[] {{
  ROOT %less = pred[] constant(true)
}}

%body (c: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %c = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %step = f32[4,4]{{1,0}} fusion(%c), kind=kLoop, calls=%f{AT.format("add", 3)}{COST.format(10)}
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%c, %step)
}}

%idle (c.2: f32[4,4]) -> f32[4,4] {{
  ROOT %c.2 = f32[4,4]{{1,0}} parameter(0)
}}

%task (c.3: f32[4,4]) -> f32[4,4] {{
  %c.3 = f32[4,4]{{1,0}} parameter(0)
  ROOT %done.3 = f32[4,4]{{1,0}} fusion(%c.3), kind=kLoop, calls=%f{AT.format("task_forward/add", 3)}{COST.format(60)}
}}

%body.2 (c.4: f32[4,4]) -> f32[4,4] {{
  %c.4 = f32[4,4]{{1,0}} parameter(0)
  ROOT %one = f32[4,4]{{1,0}} conditional(%c.4, %c.4, %c.4), true_computation=%task, false_computation=%idle{AT.format("cond", 1)}
}}

ENTRY %main (x: f32[4,4], b: f32[8,4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0){AT.format("", 1).replace("jit(f)/", "state.weights.w")}
  %b = f32[8,4,4]{{1,0}} parameter(1){AT.format("", 1).replace("jit(f)/", "batch.tokens")}
  %g = (f32[4,4]{{1,0}}, f32[16,4]{{1,0}}) all-gather-start(%x), {ALL}, dimensions={{0}}{AT.format("gather", 2)}{COST.format(100)}
  %early = f32[4,4]{{1,0}} {PRODUCT.format(40)}{AT.format("dot", 3)}
  %g.1 = f32[16,4]{{1,0}} all-gather-done(%g)
  %many = f32[8,4,4]{{2,1,0}} {BATCHED.format(5000)}{AT.format("dot", 3)}
  %wide = f64[4,4]{{1,0}} {PRODUCT.format(7000)}{AT.format("dot", 3)}
  %loop = (s32[], f32[4,4]{{1,0}}) while(%x), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %ticks = f32[4,4]{{1,0}} while(%x), condition=%cond, body=%body.2, backend_config={{"known_trip_count":{{"n":"6"}}}}
  %s = (f32[16,4]{{1,0}}, f32[4,4]{{1,0}}) reduce-scatter-start(%g.1), {ALL}, dimensions={{0}}{AT.format("scatter", 2)}, backend_config={{"reification_cost":[]}}
  ROOT %s.1 = f32[4,4]{{1,0}} reduce-scatter-done(%s)
}}
"""  # noqa: E501
FACTS = {"chip": "h100", "name": "84m_d8", "ticks": 6, "local_attention": 4, "of_any": {"forward": 5}}
ROOFLINE = (8 * 3 * 64 + 4 * 64) / 1e6  # bytes of a batched product and of one with wider results, at 1e6 a second


def test_xlas_prediction_of_a_program_by_hand():
    """The wait for the gather, less the product meanwhile; three turns; five of six ticks; all of the scatter."""
    program = parse(with_mesh(TEXT, {"d": 4}))
    chip = dataclasses.replace(chip_of("h100"), memory_bandwidth=8e6 / 8, peak={"bf16": 1e15})
    clock = Clock(program, describe(program), chip, FACTS)
    total = clock.seconds(program.entry)
    scatter = 100 * US * 400 / 374
    assert total == pytest.approx((40 + 60 + 3 * 10 + 5 * 60) * US + ROOFLINE + scatter, rel=1e-9)
    assert clock.lines["train.py:10"] == pytest.approx(60 * US + scatter)
    assert sum(clock.lines.values()) == pytest.approx(total)
    assert clock.exposed == pytest.approx({"train.py:10": 60 * US + scatter})


def test_figures_of_a_row():
    found, exposed = trainers.figures(with_mesh(TEXT, {"d": 4}), FACTS | {"peak_bytes": 2**30})
    assert found["GiB"] == 1
    assert found["GB sent"] > 0
    assert found["exposed"] == pytest.approx(1e3 * sum(exposed.values()) / found["time"])


def test_what_no_gather_tells_is_timed_by_links_and_loops_by_their_mean():
    """An exchange over other axes than any gather; a loop of unknown length."""
    text = TEXT.replace('"known_trip_count":{"n":"3"}', "")
    swap = f"%a = f32[4,4]{{1,0}} all-to-all-start(%x), replica_groups={{{{0,1}},{{2,3}}}}{AT.format('swap', 1)}"
    text = text.replace("ROOT %s.1", f"{swap}\n  ROOT %s.1")
    program = parse(with_mesh(text, {"d": 2, "e": 2}))
    chip, facts = chip_of("h100"), FACTS | {"unknown_turns": 2.5}
    clock = Clock(program, describe(program), chip, facts)
    clock.seconds(program.entry)
    assert clock.kernels["step"] == pytest.approx(2.5 * 10 * US)
    assert clock.kernels["a"] == pytest.approx(chip.collective_s("all_to_all", 64, program.mesh, ["e"]))


def test_attention_by_its_flops():
    """Two products forward and five backward, of half of the pairs: 2·2·L²/2·D of a head, and 2.5 times it."""
    call = 'custom-call(%q, %k), custom_call_target="__cudnn$fmha{}"'
    lines = "".join(
        f"  %{name} = bf16[2,8,3,16]{{3,2,1,0}} {text}\n"
        for name, text in (("q", "parameter(0)"), ("f", call.format("Softmax")), ("b", call.format("SoftmaxBackward")))
    )
    text = f"{HEAD}ENTRY %main (q: bf16[2,8,3,16], k: bf16[2,8,3,16]) -> bf16[2,8,3,16] {{\n{lines}}}\n"
    program = parse(text.replace("  %f", "  %k = bf16[2,8,3,16]{3,2,1,0} parameter(1)\n  %f"))
    chip = dataclasses.replace(chip_of("h100"), peak={"bf16": 1e9})

    def seconds(rate):
        return Clock(program, describe(program), chip, FACTS, rate).seconds(program.entry)

    forward = 2 * 2 * 2 * 3 * 8**2 / 2 * 16
    assert (seconds(0.5), seconds(0.0)) == (pytest.approx(3.5 * forward / 0.5e9), 0)


def run_on_a_gpu(tmp_path, text=TEXT):
    """A run's text, and the trace of two steps with the same kernels and of the beginning of one more."""
    (tmp_path / "training_step_optimized_hlo_1.txt").write_text(with_mesh(text, {"d": 4}))
    at = tmp_path / "plugins" / "profile" / "1"
    at.mkdir(parents=True)
    (at / "profile_by_line.json").write_text(json.dumps({"steps": 2}))
    step = [(0, 30, "gemm", "early"), (30, 90, "add", "step"), (90, 97, "k", "other")]

    def event(start, end, name, op):
        return (start, end, name, {"hlo_module": "jit_training_step", "hlo_op": op})

    compute = [event(begin + start, begin + end, *names) for begin in (0, 300, 600) for start, end, *names in step]
    streams = {"Stream #1": compute[:-2], "Stream #2": [event(5, 205, "ncclDevKernel_AllGather", "g")]}
    (at / "vm.xplane.pb").write_bytes(written({"/device:GPU:0": streams}))
    return tmp_path


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_each_kernel_beside_its_prediction(tmp_path, capsys):
    run = run_on_a_gpu(tmp_path)

    def near(*ms):
        return [pytest.approx(x) for x in ms]

    found = {label.split()[0]: [kind, took, told] for kind, took, told, label in kernels.rows(run, "h100")}
    assert found["early"] == ["products", *near(0.03, 0.04)]
    assert found["step"] == ["the rest", *near(0.06, 3 * 0.01)]  # three turns
    assert found["g"] == ["collectives", *near(0.1, 0.1)]  # in one of the two steps
    assert found["s"] == ["collectives", *near(0, 0.1 * 400 / 374)]
    assert found["other"] == ["not in the text", *near(0.007, 0)]
    kernels.main([str(run), "--chip", "h100"])
    said = capsys.readouterr().out.splitlines()
    assert "    0.100      0.207     0.48  collectives: all" in said
    assert "    0.060      0.030     2.00  the rest: step  train.py:20" in said


def test_a_run_without_predictions(tmp_path, capsys):
    """What was measured is shown, as on a CPU."""
    run = run_on_a_gpu(tmp_path, TEXT.replace("reification_cost", "cost"))
    kernels.main([str(run), "--chip", "h100"])
    said = capsys.readouterr()
    assert "    0.060      0.000        -  the rest: step  train.py:20" in said.out.splitlines()
    assert "train on a GPU, with +hardware.compiler_options" in said.err
    with pytest.raises(SystemExit):
        kernels.main([str(tmp_path / "none"), "--chip", "h100"])
    assert "has no training_step_optimized_hlo_*.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("attributes", "op_name", "matmuls"),
    [
        ('custom_call_target="__cudnn$fmhaScaleBiasSoftmax", api', "attend", 2),
        ('custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward", api', "transpose(jvp(attend))", 5),
        ('custom_call_target="__gpu$xla.gpu.triton"', "jit(step)/jvp(jit(mha))/mha_forward/pallas_call", 2),
        ('custom_call_target="__gpu$xla.gpu.triton"', "jit(step)/transpose(jvp(mha_backward))/pallas_call", 5),
        (
            'custom_call_target="__gpu$xla.gpu.triton"',
            "jit(step)/x/preprocess_backward/mha_preprocess_backward/pallas_call",
            0,
        ),
        ('custom_call_target="__cublas$lt$matmul"', "backward/einsum", 0),
    ],
)
def test_kernels_of_attention(attributes, op_name, matmuls):
    assert attention_matmuls(types.SimpleNamespace(attributes=attributes, op_name=op_name)) == matmuls


def test_what_a_program_says():
    found = programs.reading(with_mesh(TEXT, {"d": 4}), FACTS)
    assert (found["state"], found["FLOPs"]) == (64, 2 * 4 * 4 * 4 * (1 + 8 + 1))
    assert found["sent"] == {("train.py:10", op, "d"): 3 * 64 for op in ("all-gather", "reduce-scatter")}


def test_rows_that_are_there_are_left(tmp_path, monkeypatch, capsys):
    """The others are compiled one by one, and the command goes on where it was stopped."""
    started = []

    def run_apart(write, path, lower, chip, name):
        assert (write, lower) == (programs.write, compilers.lowered)
        started.append(f"{chip}.{name}")
        if len(started) == 2:
            raise ValueError("no such chip\nlast words")
        path.with_name(f"{path.name}.txt.gz").write_bytes(gzip.compress(b"a program"))
        path.with_name(f"{path.name}.json").write_text(json.dumps({"chip": chip}))

    near = {"h100": 1.009, "v5e": 1.02}
    monkeypatch.setattr(programs, "run_apart", run_apart)
    monkeypatch.setattr(compilers, "compare", lambda text, facts: ({"state": near[facts["chip"]]}, text, ["a line"]))
    options = ["--out", str(tmp_path), "--chips", "h100", "v5e", "--rows", "gpt2_d8"]
    with pytest.raises(SystemExit, match="not made: 1 rows"):
        compilers.main(options)
    said = capsys.readouterr().out
    assert "v5e.gpt2_d8 ValueError: no such chip\n" in said
    assert "state: 1 of 1 within 1 %" in said
    compilers.main([*options, "--lines"])
    assert started == ["h100.gpt2_d8", "v5e.gpt2_d8", "v5e.gpt2_d8"]
    said = capsys.readouterr().out
    assert "h100.gpt2_d8       state 1.0090  a program\n    a line\n" in said
    assert "state: 1 of 2 within 1 %" in said


def test_a_name_that_is_not_known(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compilers.main(["--out", str(tmp_path), "--chips", "h1000"])
    assert "invalid choice: 'h1000' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(("op", "bytes"), [("all_gather", 84), ("psum_scatter", 84), ("psum", 168), ("ppermute", 96)])
def test_bytes_that_a_plan_sends_are_those_of_a_ring(op, bytes):
    """Of two collectives of 48 bytes over 2 × 4 devices; a device of a ring sends 7 of its 8 parts."""
    planned = Op("train.py:1", "", "", "collective", op, 2.0, 0.0, 0.0, axes=("r", "d"), bytes=48.0)
    assert compilers.sent_by(planned, {"p": 3, "r": 2, "d": 4, "t": 5}) == bytes


ROOT = Path(__file__).parents[2]
ON_GPUS = yaml.safe_load((ROOT / "configs/hardware/gpu.yaml").read_text())["hardware"]["compiler_options"]
ADDED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False, "xla_gpu_collect_cost_model_stats": True}
"""What a missing device needs, and what annotates operations with seconds."""
UNMERGED = {"xla_gpu_dot_merger_threshold_mb": 0}


def test_what_a_run_on_gpus_relies_on_is_stated():
    """XLA's defaults are the same for Hopper, but not for every GPU, and may change."""
    assert ON_GPUS["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert ON_GPUS["xla_gpu_enable_analytical_sol_latency_estimator"] is True
    assert schedules.SCHEDULING.items() <= ON_GPUS.items()


@pytest.mark.parametrize(
    ("module", "row", "options"),
    [
        (trainers, ("124m_d8", "ours"), ON_GPUS),
        (trainers, ("124m_d4t2", "ours"), ON_GPUS | UNMERGED),
        (trainers, ("124m_d8", "plain-jax"), {}),
        (exchanges, ("ring_32k",), ON_GPUS),
        (compilers, ("84m_d8",), ON_GPUS),
    ],
)
def test_benchmarks_compile_by_the_options_of_a_run(tmp_path, monkeypatch, module, row, options):
    """And nothing else but ADDED, whatever XLA is installed."""
    given = []

    def compile(compiler_options):
        given.append(compiler_options)
        memory = types.SimpleNamespace(peak_memory_in_bytes=5)
        return types.SimpleNamespace(as_text=lambda: TEXT, memory_analysis=lambda: memory)

    lowered = types.SimpleNamespace(compile=compile)
    monkeypatch.setattr(module, "devices_of", lambda chip, count, hosts=None: jax.devices()[:count])
    monkeypatch.setattr(programs.devices, "known_options", lambda options, say: dict(options))
    if module is trainers:
        peer = importlib.import_module(f"bench.throughput.peers.{trainers.TRAINERS[row[1]]}")
        monkeypatch.setattr(peer.Contestant, "lowered", lambda job, devices: lowered)
    else:
        monkeypatch.setattr(module, "trace_step", lambda c, model: types.SimpleNamespace(lower=lambda: lowered))
    programs.write(tmp_path / "row", module.lowered, "h100", *row)
    assert given == [options | ADDED]
    assert json.loads((tmp_path / "row.json").read_text())["peak_bytes"] == 5


def test_schedules_are_compared_by_instructions_in_order(monkeypatch, capsys):
    """Seconds don't count; two instructions that change places do, both of them."""
    early = next(line for line in TEXT.splitlines(keepends=True) if "%early" in line)
    moved = TEXT.replace(early, "").replace("  %many", early + "  %many")
    assert moved != TEXT
    told = TEXT.replace('"exec_time_us"', '"time_us"')
    texts = {"annotated": told, "default": moved, "run": TEXT}

    def compiled(options):
        if "xla_gpu_collect_cost_model_stats" in options:
            return types.SimpleNamespace(as_text=lambda: texts["annotated"])
        scheduled = "xla_gpu_enable_latency_hiding_scheduler" in options
        return types.SimpleNamespace(as_text=lambda: texts["run" if scheduled else "default"])

    step = types.SimpleNamespace(options=ON_GPUS, compiled=compiled)
    monkeypatch.setattr(schedules, "lowered", lambda chip, row: step)
    monkeypatch.setattr(schedules, "run_apart", lambda made, *arguments: made(*arguments))
    schedules.main(["--rows", "ring_32k"])
    assert "annotated: same  default: 2 differ" in capsys.readouterr().out
    texts["annotated"] = moved
    with pytest.raises(SystemExit, match="another schedule: 1 rows"):
        schedules.main(["--rows", "ring_32k"])
    assert "annotated: 2 differ  default: 2 differ" in capsys.readouterr().out


def test_scheduler_options_of_other_trainers_are_tried_too():
    """Theirs have none; ours are tried without."""
    assert schedules.ways("h100", {})["set"].items() >= schedules.SCHEDULING.items()
    ours = schedules.ways("h100", ON_GPUS)
    assert ours["run"].keys() - ours["default"].keys() == schedules.SCHEDULING.keys()
    assert ours["annotated"].keys() - ours["run"].keys() == {"xla_gpu_collect_cost_model_stats"}
