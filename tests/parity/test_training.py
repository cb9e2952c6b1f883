"""H7b: ported training jobs next to torch's, with mistakes of ports, which have to be named."""

import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfn
from tests.support.marks import row, slow

torch = pytest.importorskip("torch")

from tests.support.training_jobs import (  # noqa: E402
    JOBS,
    PAIRS,
    RATE,
    STEPS,
    Job,
    mistakes_of,
    rated,
    trainings,
)

TRAININGS = trainings()
SFT, DPO, PPO = Job("transformer", "sft"), Job("gru", "dpo"), Job("cnn", "ppo")


def check(job, wrong="", training="sgd", optimizer=None, make=None, seed=0, **options):
    """Runs the check of a job with a mistake in its loss or another optimizer."""
    used = TRAININGS[training]
    return jaxfn.trainingcheck(
        job.loss(wrong),
        job.torch_loss,
        job.batches(used.batches, seed),
        module=job.module(seed),
        load=job.load,
        optimizer=(optimizer or used.optimizer, make or used.make),
        has_buffers=job.has_buffers,
        raise_exception=False,
        **(used.options | options),
    )


def linear_job(optimizer, make, size=3, **options):
    """Checks a right port of a linear layer with large gradients."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    batches = [{"x": 3 * generator.normal(size=(4, size)), "y": generator.normal(size=(4, 10))} for _ in range(3)]
    return jaxfn.trainingcheck(
        lambda p, batch: ((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2).mean(),
        lambda module, batch: ((module(batch["x"]) - batch["y"]) ** 2).mean(),
        batches,
        module=torch.nn.Linear(size, 10),
        load=lambda arrays: {"w": arrays["weight"].T, "b": arrays["bias"]},
        optimizer=(optimizer, make),
        raise_exception=False,
        **options,
    )


@row("H7b")
@pytest.mark.parametrize("norm", [0.1, 1.5, 100.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_clipping_by_norm_of_right_ports(norm, decay):
    """SGD, whose steps are as long as gradients, and decay that nearly cancels some clipped gradients."""
    chain = optax.clip_by_global_norm(norm), optax.add_decayed_weights(decay)
    sgd = lambda parameters: torch.optim.SGD(parameters, 0.1, weight_decay=decay)  # noqa: E731
    report = linear_job(optax.chain(*chain, optax.sgd(0.1)), sgd, max_norm=norm)
    assert report, report
    adam = lambda parameters: torch.optim.Adam(parameters, 0.01, weight_decay=decay)  # noqa: E731
    report = linear_job(optax.chain(*chain, optax.adam(0.01)), adam, size=20, max_norm=norm)
    assert report, report
    wrong = optax.chain(optax.clip_by_global_norm(1.001 * norm), chain[1], optax.adam(0.01))
    assert linear_job(wrong, adam, size=20, max_norm=norm).stage == "clipping"


@row("H7b")
def test_gradients_of_zero_in_float32():
    def torch_loss(module, batch):
        assert module.weight.dtype == torch.float32
        return (module(batch["i"]) ** 2).mean()

    report = jaxfn.trainingcheck(
        lambda p, batch: (p["w"][batch["i"]] ** 2).mean(),
        torch_loss,
        [{"i": np.array([0, 1, 1])}] * 3,  # The third row has no gradient, and decays.
        module=torch.nn.Embedding(3, 2),
        load=lambda arrays: {"w": arrays["weight"]},
        optimizer=(optax.adamw(0.1, weight_decay=0.01), lambda p: torch.optim.AdamW(p, 0.1)),
        raise_exception=False,
    )
    assert report, report
    assert all(np.isfinite(row.tolerance) for row in report.rows)


def identify(value):
    return f"{value.family} {value.objective}" if isinstance(value, Job) else value


@row("H7b")
@pytest.mark.parametrize("job, training", [(SFT, "adamw"), (DPO, "adam"), (PPO, "sgd")], ids=identify)
def test_right_ports(job, training):
    report = check(job, training=training, seed=1)
    assert report, report
    assert (report.step, report.stage, report.name, report.steps) == (None, "", "", STEPS)
    largest = max(row.error for row in report.rows if row.stage != "clipping")
    assert largest < (1e-7 if training == "adamw" else 1e-12)  # torch's epsilon of norms
    names = {row.name for row in report.rows if row.stage == "gradient"}
    assert names == {name for name, p in job.module().named_parameters() if p.requires_grad}
    stages = {row.stage for row in report.rows}
    buffers = {"buffers"} if job.has_buffers else set()
    clipping = {"clipping"} if training == "adamw" else set()
    assert stages == {"loss", "gradient", "optimizer", "parameters"} | buffers | clipping


LOSSES = {
    (SFT, "sum"): "a sum where torch has a mean over",
    (SFT, "mean"): "a mean over 12 where torch has one over 6",
    (SFT, "shift"): r"it agrees with \['labels'\] of the batch shifted by -1 along axis 1",
    (SFT, "constant"): "zero in the port: stop_gradient, or a constant",
    (SFT, "dropout"): "the port draws random numbers, as dropout does",
    (DPO, "reference"): "a frozen parameter that is trained",
    (DPO, "beta"): "0.2 times torch's, while the losses agree",
    (DPO, "swap"): "-1 times torch's, while the losses agree",
    (DPO, "mask"): r"the port does not use \['chosen_mask'\], \['rejected_mask'\] of the batch",
    (PPO, "mask"): r"the port does not use \['mask'\] of the batch",
    (PPO, "advantage"): "something is constant in one library",
    (PPO, "no clip"): "loss: policy",
    (PPO, "buffers"): r"buffers: body.norm.running_.* \(the port does not change it\)",
    (PPO, "momentum"): "its change is 2 times torch's: another momentum",
}


@row("H7b")
@pytest.mark.parametrize("job, wrong", LOSSES, ids=identify)
def test_mistakes_of_losses(job, wrong):
    report = check(job, wrong)
    stage, name = mistakes_of(job)[wrong]
    assert not report and (report.step, report.stage) == (0, stage) and name in report.name, report
    assert_matches(report, LOSSES[job, wrong])


def assert_matches(report, words):
    with pytest.raises(jaxfn.CheckError, match=words) as caught:
        report.raise_if_failed()
    assert caught.value.report is report


SMALL = Job("mlp", "sft")
OPTIMIZERS = {
    "no clipping": (0, "the port does not clip, torch clips to 0.5"),
    "other norm": (0, "the port clips to 0.4, torch clips to 0.5"),
    "decay of all": (0, "times the parameter: weight decay"),
    "late schedule": (0, "times torch's: another learning rate, schedule or bias correction"),
    "epsilon": (0, "another epsilon"),
    "decay rate": (0, "10 times torch's: another decay rate of the average"),
    "sum of batches": (0, "2 times torch's"),
    "no bias correction": (0, "times torch's: another learning rate, schedule or bias correction"),
    "epsilon inside": (0, "another epsilon"),
    "momentum": (1, "it differs by -0.1 times its last value: another decay rate"),
    "nesterov": (0, "1.9 times torch's"),
}


@row("H7b")
@pytest.mark.parametrize("wrong", OPTIMIZERS)
def test_mistakes_of_optimizers(wrong):
    (training,) = (name for name, used in TRAININGS.items() if wrong in used.mistakes)
    optimizer, stage, name = TRAININGS[training].mistakes[wrong]
    report = check(SMALL, training=training, optimizer=optimizer)
    step, words = OPTIMIZERS[wrong]
    assert not report and (report.step, report.stage) == (step, stage) and name in report.name, report
    assert_matches(report, words)


def step_schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


HALVED = optax.exponential_decay(RATE, 2, 0.5, staircase=True)


@row("H7b")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_optimizers(name):
    of_torch, of_optax = PAIRS[name]
    job = SMALL
    arguments = job.loss(), job.torch_loss, job.batches(STEPS)
    options = {"module": job.module(), "load": job.load}
    report = jaxfn.trainingcheck(*arguments, **options, optimizer=(of_optax, of_torch))
    assert max(row.error for row in report.rows) < (1e-8 if name == "adafactor" else 1e-12)  # which has other epsilons
    with pytest.raises(jaxfn.CheckError):
        jaxfn.trainingcheck(*arguments, **options, optimizer=(optax.chain(of_optax, optax.scale(1.001)), of_torch))


@row("H7b")
def test_a_schedule_by_steps():
    right = check(SMALL, optimizer=optax.sgd(HALVED, 0.9), scheduler=step_schedule)
    assert right and not right.notes and max(row.error for row in right.rows) < 1e-12, right
    late = check(SMALL, optimizer=optax.sgd(lambda n: HALVED(n - 1), 0.9), scheduler=step_schedule)
    assert (late.step, late.stage) == (2, "parameters") and "2 times torch's" in late.looks_like, late


class Single(torch.nn.Module):
    """A module that runs in float32 alone."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.fc(x.float()) @ torch.ones(3, 2))


@row("H7b")
@pytest.mark.parametrize("wrong", [False, True])
def test_a_module_that_does_not_run_in_float64(wrong):
    def loss(p, batch):
        y = jnp.tanh((batch["x"] @ p["fc.weight"].T + p["fc.bias"]) @ jnp.ones((3, 2), jnp.float32))
        return (y**2).sum() if wrong else (y**2).mean()

    torch.manual_seed(0)
    batches = [{"x": np.random.default_rng(i).standard_normal((5, 4)).astype(np.float32)} for i in range(STEPS)]
    optimizer = optax.adam(RATE), rated(torch.optim.Adam)
    report = jaxfn.trainingcheck(
        loss,
        lambda module, batch: (module(batch["x"]) ** 2).mean(),
        batches,
        module=Single(),
        load=dict,
        optimizer=optimizer,
        raise_exception=False,
    )
    assert bool(report) is not wrong, report
    assert "torch does not run in float64" in report.notes[0]
    assert not wrong or (report.step, report.stage, report.name) == (0, "loss", "loss")


@row("H7b")
def test_a_port_of_another_structure():
    job = SMALL
    module = job.module()

    def run(change_load=dict, change_loss=lambda loss, p: loss):
        return jaxfn.trainingcheck(
            lambda p, batch: change_loss(job.loss()(p["net"], batch), p),
            job.torch_loss,
            job.batches(2),
            module=module,
            load=lambda arrays: change_load({"net": job.load(arrays)}),
            optimizer=(optax.sgd(RATE), rated(torch.optim.SGD)),
            raise_exception=False,
        )

    extra = run(lambda p: p | {"scale": jnp.ones(())}, lambda loss, p: loss + p["scale"] - 1)
    assert (extra.stage, extra.name) == ("gradient", "the port's ['scale']"), extra
    lost = run(lambda p: {"net": p["net"] | {"head": np.asarray(module.head.weight.detach().double()).T}})
    assert (lost.stage, lost.name, lost.failures[0].verdict) == ("gradient", "head.weight", "missing"), lost
    terms = run(change_loss=lambda loss, p: {"loss": loss, "decay": 0.0 * loss})
    assert (terms.stage, terms.name, terms.failures[0].verdict) == ("loss", "decay", "extra"), terms


class Sign(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= RATE * p.grad.sign()


@row("H7b")
def test_an_optimizer_that_ignores_the_size_of_gradients():
    wrong = check(SMALL, optimizer=optax.sign_sgd(2 * RATE), make=Sign)
    assert (wrong.stage, wrong.looks_like[:24]) == ("parameters", "its change is 2 times to"), wrong


class Adversary(torch.nn.Module):
    """A generator, a discriminator, which the optimizer does not have, and an average that the forward pass updates."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
        self.average = torch.nn.Parameter(torch.randn(2), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.generator.bias, 0.1)
        return torch.nn.functional.softplus(self.discriminator(self.generator(x) - self.average)).mean()


@row("H7b")
@pytest.mark.parametrize("wrong", ["", "trains", "keeps", "does not return"])
def test_parameters_that_the_optimizer_does_not_have(wrong):
    names = ["generator.weight", "generator.bias"] + ["discriminator.weight"] * (wrong == "trains")

    def load(arrays):
        constant = {name: x for name, x in arrays.items() if name not in names and name != "average"}
        average = {} if wrong == "does not return" else {"average": arrays["average"]}
        return {name: arrays[name] for name in names}, constant | average

    def loss(p, s, batch):
        new = dict(s)
        average = s.get("average", jnp.zeros(2))
        if wrong not in ("keeps", "does not return"):
            average = new["average"] = 0.9 * average + 0.1 * jax.lax.stop_gradient(p["generator.bias"])
        a = s | p
        x = batch["x"] @ a["generator.weight"].T + a["generator.bias"] - average
        y = x @ a["discriminator.weight"].T + a["discriminator.bias"]
        return jax.nn.softplus(y).mean(), new

    report = jaxfn.trainingcheck(
        loss,
        lambda module, batch: module(batch["x"]),
        [{"x": np.random.default_rng(i).standard_normal((4, 3))} for i in range(3)],
        module=Adversary(),
        load=load,
        optimizer=(optax.adam(RATE), lambda parameters: torch.optim.Adam(parameters[:2], RATE)),
        has_buffers=True,
        raise_exception=False,
    )
    expected = {"": ("", ""), "trains": ("gradient", "discriminator.weight")}
    assert (report.stage, report.name) == expected.get(wrong, (report.stage, report.name)), report
    assert bool(report) is not wrong or report.stage in ("loss", "buffers"), report


def check_linear(module, make, scale=1.0, optimizer=None, **options):
    """Checks a regression, whose loss is scaled."""
    return jaxfn.trainingcheck(
        lambda p, batch: scale * ((batch["x"] @ p["weight"].T + p["bias"]) ** 2).mean(),
        lambda module, batch: scale * (module(batch["x"]) ** 2).mean(),
        [{"x": np.random.default_rng(i).standard_normal((4, module.in_features))} for i in range(2)],
        module=module,
        load=dict,
        optimizer=(optimizer or optax.sgd(RATE), make),
        raise_exception=False,
        **options,
    )


@row("H7b")
@pytest.mark.parametrize("rate", [RATE, 2 * RATE])
def test_groups_of_parameters_with_other_rates(rate):
    optimizers = {"weight": optax.adam(RATE), "bias": optax.adam(2 * rate)}
    optimizer = optax.transforms.partition(optimizers, {"weight": "weight", "bias": "bias"})

    def make(parameters):
        return torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 2 * RATE}], RATE)

    report = check_linear(torch.nn.Linear(3, 2), make, optimizer=optimizer)
    assert (report.stage, report.name) == (("", "") if rate == RATE else ("parameters", "bias")), report
    assert not report.notes, report


@row("H7b")
def test_constants_that_the_loss_computes_are_in_float64():
    report = jaxfn.trainingcheck(
        lambda p, batch: (batch["x"] @ p["weight"].T @ jnp.exp(jnp.arange(2) / 3)).mean(),
        lambda module, batch: (module(batch["x"]) @ torch.exp(torch.arange(2) / 3)).mean(),
        [{"x": np.random.default_rng(0).standard_normal((4, 3))}],
        module=torch.nn.Linear(3, 2, bias=False),
        load=dict,
        optimizer=(optax.sgd(RATE), rated(torch.optim.SGD)),
    )
    assert report and not report.notes and torch.get_default_dtype() == torch.float32, report


@row("H7b")
def test_clipping_of_small_gradients():
    optimizer = optax.chain(optax.clip_by_global_norm(1e-5), optax.adam(RATE))
    report = check_linear(torch.nn.Linear(3, 2), rated(torch.optim.Adam), 1e-4, optimizer, max_norm=1e-5)
    assert report and not report.notes, report


@row("H7b")
@pytest.mark.parametrize("max_norm", [1e-5, 1e5])  # all steps are clipped, or none
def test_clipping_is_compared_where_it_does_not_show(max_norm):
    def run(*transformations):
        optimizer = optax.chain(*transformations, optax.adam(RATE))
        return check_linear(torch.nn.Linear(3, 2), rated(torch.optim.Adam), 1.0, optimizer, max_norm=max_norm)

    clip = optax.clip_by_global_norm(max_norm)
    assert run(clip)
    summed, other, missing = run(optax.scale(2.0), clip), run(optax.clip_by_global_norm(2 * max_norm)), run()
    assert f"the port clips to {max_norm / 2:.3g}, torch clips to {max_norm:.3g}" == summed.looks_like, summed
    assert f"the port clips to {2 * max_norm:.3g}, torch clips to {max_norm:.3g}" == other.looks_like, other
    assert f"the port does not clip, torch clips to {max_norm:.3g}" == missing.looks_like, missing


@row("H7b")
def test_an_optimizer_of_other_parameters_raises():
    module = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match="other parameters than those of the list that it is passed"):
        check_linear(module, lambda _: torch.optim.SGD(module.parameters(), RATE))


@row("H7b")
def test_what_is_nearly_a_factor_is_not_called_one():
    late = check(SMALL, optimizer=optax.sgd(lambda count: RATE * jnp.minimum(count, 1), 0.9))
    assert late.stage == "parameters" and late.looks_like.startswith("its change is 0 times torch's"), late
    make = rated(torch.optim.RMSprop, eps=1.0)  # which is large for these gradients
    inside = check(SMALL, optimizer=optax.rmsprop(RATE, 0.99, eps=1.0), make=make)
    assert inside.stage == "parameters" and "learning rate" not in inside.looks_like, inside
    module = torch.nn.Linear(1, 1, bias=False)
    module.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))
    decays = check_linear(module, rated(torch.optim.Adam), optimizer=optax.adamw(RATE, weight_decay=1.0))
    assert (decays.stage, decays.name, decays.looks_like) == ("parameters", "weight", ""), decays


@row("H7b")
def test_gradients_that_are_not_finite_are_a_note():
    report = check_linear(torch.nn.Linear(3, 2), rated(torch.optim.SGD), np.nan)
    assert any(note.startswith("not finite in torch is the gradient of weight") for note in report.notes), report


@row("H7b")
def test_sparse_gradients():
    report = jaxfn.trainingcheck(
        lambda p, batch: (p["weight"][batch["i"]] ** 2).sum(),
        lambda module, batch: (module(batch["i"]) ** 2).sum(),
        [{"i": np.array(i)} for i in ([3, 1, 3], [0, 0, 4])],
        module=torch.nn.Embedding(7, 2, sparse=True),
        load=dict,
        optimizer=(optax.sgd(RATE), rated(torch.optim.SGD)),
    )
    assert report and not report.notes, report


PORT = """
    import jax, jax.numpy as jnp, optax

    def load(arrays):
        return {"w": arrays["weight"].T, "b": arrays["bias"]}

    def loss(p, batch):
        return ((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2).mean()

    def wrong(p, batch):
        return loss(jax.lax.stop_gradient(p) | {"w": p["w"]}, batch)

    optimizer = optax.adam(1e-2)
"""
RUN = """
    import sys
    sys.modules["torch"] = None  # importing it fails
    import jaxfn, port
    for loss in port.loss, port.wrong:
        report = jaxfn.trainingcheck(loss, "job.npz", load=port.load, optimizer=port.optimizer, raise_exception=False)
        print(report.passed, report.steps, report.stage, report.name)
"""


@pytest.fixture
def recorded(tmp_path):
    """A folder with a recorded job."""
    generator = np.random.default_rng(0)
    batches = [{"x": generator.standard_normal((4, 3)), "y": generator.standard_normal((4, 2))} for _ in range(3)]
    jaxfn.record_reference(
        lambda module, batch: ((module(batch["x"]) - batch["y"]) ** 2).mean(),
        batches,
        tmp_path / "job.npz",
        module=torch.nn.Linear(3, 2),
        optimizer=rated(torch.optim.Adam),
    )
    return tmp_path


@row("H7b")
def test_a_recorded_job_without_torch(recorded):
    (recorded / "port.py").write_text(textwrap.dedent(PORT))
    (recorded / "run.py").write_text(textwrap.dedent(RUN))
    run = subprocess.run([sys.executable, "run.py"], cwd=recorded, capture_output=True, text=True, check=True)
    assert run.stdout == "True 3  \nFalse 1 gradient bias\n"


def ports():
    names: dict = {}
    exec(textwrap.dedent(PORT), names)
    return names


@row("H7b", "H7")
def test_a_changed_file_raises(recorded):
    port = ports()
    with np.load(recorded / "job.npz") as file:
        content = dict(file)
    options = {"load": port["load"], "optimizer": port["optimizer"]}
    for name in content.keys() - {"digest"}:
        value = content[name]
        changed = (
            np.array(str(value).replace("Adam", "SGD")) if value.dtype.kind == "U" else value + value.dtype.type(1)
        )
        np.savez(recorded / "changed.npz", **(content | {name: changed}))
        with pytest.raises(ValueError, match=r"changed.npz cannot be read \(ValueError: it was changed after it was"):
            jaxfn.trainingcheck(port["loss"], recorded / "changed.npz", **options)
    assert jaxfn.trainingcheck(port["loss"], recorded / "job.npz", **options)
    for wrong in ({"batches": []}, {"max_norm": 1.0}, {"accumulate": 2}, {"optimizer": (optax.sgd(1.0), None)}):
        with pytest.raises(TypeError, match="a recorded job has its own"):
            jaxfn.trainingcheck(port["loss"], recorded / "job.npz", **(options | wrong))
    with pytest.raises(ValueError, match="it is a reference for trainingcheck"):
        jaxfn.paritycheck(port["loss"], recorded / "job.npz")
    with pytest.raises(TypeError, match="`optimizer` is optax's alone; got <function"):
        jaxfn.trainingcheck(port["loss"], recorded / "job.npz", **(options | {"optimizer": port["loss"]}))


@row("H7b")
def test_the_report_as_text_json_and_html():
    report = check(SMALL, "sum")
    assert str(report).startswith("trainingcheck of ") and "FAILED at step 0, loss: loss (" in str(report)
    found = json.loads(report.to_json())
    assert (found["passed"], found["step"], found["stage"], found["name"]) == (False, 0, "loss", "loss")
    assert found["rows"][0]["verdict"] == "differs" and found["looks_like"] == report.looks_like
    assert "FAILED at step 0" in report._repr_html_()


@row("H7b")
def test_wrong_arguments():
    job = SMALL
    right = {"module": job.module(), "load": job.load, "optimizer": (optax.sgd(RATE), rated(torch.optim.SGD))}
    arguments = job.loss(), job.torch_loss, job.batches(3)
    with pytest.raises(ValueError, match="expected one or more steps of 2 batches, got 3"):
        jaxfn.trainingcheck(*arguments, **right, accumulate=2)
    with pytest.raises(TypeError, match="`optimizer` is a pair, of optax's and torch's"):
        jaxfn.trainingcheck(*arguments, **(right | {"optimizer": optax.sgd(RATE)}))
    with pytest.raises(TypeError, match="`module` has to be a torch module"):
        jaxfn.trainingcheck(*arguments, **(right | {"module": job}))
    with pytest.raises(TypeError, match="its term 'loss' is an array of shape"):
        jaxfn.trainingcheck(lambda p, batch: p["head"], *arguments[1:], **right)
    with pytest.raises(TypeError, match=r"has to return \(loss, new buffers\)"):
        jaxfn.trainingcheck(
            lambda p, buffers, batch: job.loss()(p, batch),
            *arguments[1:],
            **(right | {"load": lambda arrays: (job.load(arrays), {})}),
            has_buffers=True,
        )
    with pytest.raises(TypeError, match="a training job has a `module`"):
        jaxfn.record_reference(job.torch_loss, arguments[2], "job.npz", optimizer=right["optimizer"][1])


@slow
@row("H7b")
@pytest.mark.parametrize("job", JOBS, ids=identify)
def test_all_jobs(job, tmp_path):
    index = JOBS.index(job)
    number = index // 3
    used = list(TRAININGS.values())[(index + number) % 3]
    path = tmp_path / "job.npz"
    jaxfn.record_reference(
        job.torch_loss, job.batches(used.batches), path, module=job.module(), optimizer=used.make, **used.options
    )

    def run(loss, optimizer):
        return jaxfn.trainingcheck(
            loss, path, load=job.load, optimizer=optimizer, has_buffers=job.has_buffers, raise_exception=False
        )

    report = run(job.loss(), used.optimizer)
    assert report, report
    mistakes = [(job.loss(wrong), used.optimizer, *where) for wrong, where in mistakes_of(job).items()]
    mistakes += [(job.loss(), *wrong) for wrong in used.mistakes.values()]
    for loss, optimizer, stage, name in mistakes[number % 3 :: 3]:
        report = run(loss, optimizer)
        assert not report and report.stage == stage and name in report.name, report
