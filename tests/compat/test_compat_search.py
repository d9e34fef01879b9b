"""Hyper-parameter search: Optuna itself in this process; stand-ins for Ray Tune and W&B.

`Searching` is a stand-in for the Trainer: the search itself, with a `train` that evaluates a
formula. See test_compat_search_ranks.py for searches with the real Trainer on two processes.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import optuna
import pytest
import transformers
from side_by_side import ARGUMENTS, LIBRARIES, Classifier, samples

from drivetrain.compat import Trainer, TrainingArguments, default_compute_objective
from drivetrain.compat.integrations.search import set_argument
from drivetrain.compat.trainer.search import SearchMixin


class Searching(SearchMixin):
    """Trains by a formula, whose loss is best at a learning rate of 3e-5."""

    def __init__(self, output_dir: Path | str, **given: Any) -> None:
        self.args: Any = TrainingArguments(str(output_dir), **given)
        self.model_init: Any = dict
        self.driver_session = SimpleNamespace(close=lambda: None)
        self.accelerator = SimpleNamespace(free_memory=lambda: None)
        self.callback_handler = SimpleNamespace(on_train_end=self._ended)
        self.state = self.control = SimpleNamespace(should_save=False)
        self.evaluations = 2
        self.trials: list[dict[str, Any]] = []
        self.num_ended = 0

    def create_accelerator_and_postprocess(self) -> None:
        self.trials.append(
            {
                "folder": self._get_output_dir(self._trial),
                "batch": self._train_batch_size,
                "rate": self.args.learning_rate,
            }
        )

    def _ended(self, *ignored: Any) -> None:
        self.num_ended += 1

    def evaluate(self) -> dict[str, float]:
        return {"eval_loss": abs(self.args.learning_rate - 3e-5) * 1e5, "epoch": 1.0}

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> None:
        self._hp_search_setup(trial)
        for step in range(self.evaluations):
            self._report_to_hp_search(trial, step, self.evaluate())
        self._ended()


def rates(*values: float) -> Callable[[Any], dict[str, Any]]:
    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", list(values))}

    return space


def grid(*values: float) -> Any:
    return optuna.samplers.GridSampler({"learning_rate": list(values)}, seed=0)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.mark.row("H1", "H6", "H7", "H14")
def test_the_best_trial_is_found(tmp_path: Path) -> None:
    trainer = Searching(tmp_path)
    values = (1e-5, 2.5e-5, 9e-5)
    best = trainer.hyperparameter_search(rates(*values), n_trials=3, sampler=grid(*values))
    assert not isinstance(best, list) and best is not None
    assert best.hyperparameters == {"learning_rate": 2.5e-5}
    assert best.objective == pytest.approx(0.5)
    assert trainer.trials[int(best.run_id)]["rate"] == 2.5e-5
    folders = [trial["folder"] for trial in trainer.trials]
    assert folders == [str(tmp_path / f"run-{number}") for number in range(3)]
    assert trainer.hp_search_backend is None
    trainer.hyperparameter_search(
        lambda trial: {"per_device_train_batch_size": trial.suggest_int("n", 2, 2)},
        n_trials=1,
        hp_name=lambda trial: f"named-{trial.number}",
    )
    assert trainer.trials[-1]["batch"] == 2
    assert trainer.trials[-1]["folder"] == str(tmp_path / "named-0")


@pytest.mark.row("H4")
def test_the_default_space_is_that_of_transformers(tmp_path: Path) -> None:
    sampler = optuna.samplers.RandomSampler(seed=3)
    best: Any = Searching(tmp_path).hyperparameter_search(n_trials=1, sampler=sampler)
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3)).ask()
    assert best.hyperparameters == transformers.trainer_utils.default_hp_space_optuna(trial)


@pytest.mark.row("H5")
def test_the_default_objective() -> None:
    theirs = transformers.trainer_utils.default_compute_objective
    for metrics in (
        {"eval_loss": 1.0, "epoch": 2, "eval_runtime": 3.0, "eval_samples_per_second": 4.0},
        {"eval_loss": 1.0, "eval_f1": 0.5, "eval_accuracy": 0.25, "eval_steps_per_second": 1.0},
    ):
        assert default_compute_objective(metrics) == theirs(dict(metrics))
    noisy = {"eval_loss": 1.0, "eval_model_preparation_time": 9.0, "eval_mem_cpu_alloc_delta": 7.0}
    assert default_compute_objective(noisy) == 1.0


@pytest.mark.row("H2", "H3")
def test_what_a_search_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Searching(tmp_path)
    with pytest.raises(ValueError, match="allowed are optuna, ray, wandb"):
        trainer.hyperparameter_search(backend="sigopt")
    with monkeypatch.context() as without:
        without.setattr("drivetrain.compat.integrations.search.find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match=r"pip install 'ray\[tune\]'"):
            trainer.hyperparameter_search(backend="ray")
    with pytest.raises(ValueError, match="sqlite"):
        trainer.hyperparameter_search(n_jobs=2)
    trainer.model_init = None
    with pytest.raises(RuntimeError, match="model_init"):
        trainer.hyperparameter_search()


@pytest.mark.row("H8")
def test_a_hopeless_trial_is_pruned(tmp_path: Path) -> None:
    trainer = Searching(tmp_path)
    values = (3e-5, 9e-5)
    storage = f"sqlite:///{tmp_path}/trials.db"
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": values[trial.number]},
        n_trials=2,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
        storage=storage,
        study_name="pruned",
    )
    assert not isinstance(best, list) and best is not None and best.run_id == "0"
    states = [t.state.name for t in optuna.load_study(study_name="pruned", storage=storage).trials]
    assert states == ["COMPLETE", "PRUNED"]
    assert trainer.num_ended == 2  # the pruned one was ended, too


@pytest.mark.row("H9")
def test_several_objectives_give_the_runs_that_none_beats(tmp_path: Path) -> None:
    trainer = Searching(tmp_path)
    values = (1e-5, 2e-5, 3e-5)
    best = trainer.hyperparameter_search(
        rates(*values),
        compute_objective=lambda metrics: [metrics["eval_loss"], trainer.args.learning_rate],
        n_trials=3,
        direction=["minimize", "minimize"],
        sampler=grid(*values),
    )
    assert isinstance(best, list)
    assert sorted(run.hyperparameters["learning_rate"] for run in best) == list(values)


def test_no_evaluation_while_training_means_one_afterwards(tmp_path: Path) -> None:
    trainer = Searching(tmp_path)
    trainer.evaluations = 0
    best = trainer.hyperparameter_search(rates(3e-5), n_trials=1)
    assert not isinstance(best, list) and best is not None and best.objective == 0


@pytest.mark.row("H6")
def test_values_get_the_type_of_the_argument(caplog: pytest.LogCaptureFixture) -> None:
    args = TrainingArguments("o")
    for name, value in {
        "seed": 3.0,
        "lr_scheduler_type": "cosine",
        "run_name": 5,
        "seeds": 1,
    }.items():
        set_argument(args, name, value)
    assert (args.seed, type(args.seed), args.lr_scheduler_type.value) == (3, int, "cosine")
    assert args.run_name == 5  # nothing to cast by
    assert not hasattr(args, "seeds") and "seeds=1" in caplog.text


@pytest.mark.slow
@pytest.mark.row("H1")
def test_processes_share_a_study_through_its_storage(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_compat_search import Searching
trainer = Searching({str(tmp_path)!r})
space = lambda trial: {{"learning_rate": trial.suggest_float("learning_rate", 1e-5, 9e-5)}}
trainer.hyperparameter_search(
    space, n_trials=3, storage="sqlite:///{tmp_path}/t.db", study_name="s", load_if_exists=True
)
print(*(trial["folder"] for trial in trainer.trials))
"""
    optuna.create_study(storage=f"sqlite:///{tmp_path}/t.db", study_name="s")
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [folder for process in both for folder in process.communicate(timeout=200)[0].split()]
    assert sorted(folders) == sorted(str(tmp_path / f"run-{number}") for number in range(6))
    study = optuna.load_study(storage=f"sqlite:///{tmp_path}/t.db", study_name="s")
    assert len(study.trials) == 6


@pytest.mark.row("H10")
def test_other_ranks_follow_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    leading, following = Searching(tmp_path), Searching(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    leading.driver_session = SimpleNamespace(
        close=lambda: None,
        session=SimpleNamespace(exchange=lambda value: (sent.append(value), [value])[1]),
    )
    best = leading.hyperparameter_search(rates(1e-5, 3e-5), n_trials=3)
    assert best is not None
    received = iter(sent)
    following.driver_session = SimpleNamespace(
        close=lambda: None, session=SimpleNamespace(exchange=lambda value: [next(received)])
    )
    monkeypatch.setenv("RANK", "1")
    assert following.hyperparameter_search(rates(1e-5, 3e-5), n_trials=3) is None
    assert [t["rate"] for t in following.trials] == [t["rate"] for t in leading.trials]
    assert next(received, "nothing") == "nothing"


class Sweeps(ModuleType):
    """A stand-in for wandb: a sweep of two given values."""

    def __init__(self, values: list[float]) -> None:
        super().__init__("wandb")
        self.values, self.run, self.asked = values, None, {}
        self.__spec__ = SimpleNamespace()  # type: ignore[assignment]

    def sweep(self, configuration: dict[str, Any], **where: Any) -> str:
        self.asked = configuration
        return "sweep-1"

    def agent(self, sweep_id: str, function: Callable[[], None], count: int, **where: Any) -> None:
        for number in range(count):
            config: Any = type("Config", (dict,), {"update": lambda *ignored: None})(
                learning_rate=self.values[number]
            )
            self.run = SimpleNamespace(id=f"run{number}", config=config)
            function()


@pytest.mark.row("H3")
def test_a_sweep_of_wandb_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Sweeps([9e-5, 2e-5, 1e-5])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    best = Searching(tmp_path).hyperparameter_search(backend="wandb", n_trials=3, name="n")
    assert not isinstance(best, list) and best is not None
    assert (best.run_id, best.hyperparameters) == ("run1", {"learning_rate": 2e-5})
    assert best.run_summary == "sweep-1"
    assert wandb.asked["metric"] == {"name": "eval/loss", "goal": "minimize"}


def plain() -> Classifier:
    return Classifier()


@pytest.mark.row("H11", "H1", "H7")
def test_the_state_describes_the_trial(tmp_path: Path) -> None:
    found: list[Any] = []
    for name, library in LIBRARIES.items():
        given = {**ARGUMENTS, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
        args = library.TrainingArguments(str(tmp_path / name), **given)
        trainer = library.Trainer(None, args, train_dataset=samples(), model_init=plain)
        trainer.eval_dataset = samples(4)
        best = trainer.hyperparameter_search(
            rates(1e-2, 1e-3),
            n_trials=2,
            hp_name=lambda trial: f"trial-{trial.number}",
            sampler=grid(1e-2, 1e-3),
        )
        files = sorted((tmp_path / name).glob("*/checkpoint-2/trainer_state.json"))
        states = [library.TrainerState.load_from_json(str(path)) for path in files]
        found.append(
            [
                [(s.trial_name, s.trial_params, s.is_hyper_param_search) for s in states],
                [path.parts[-3] for path in files],
                best.hyperparameters,
                pytest.approx(best.objective, rel=1e-5),
            ]
        )
    assert found[0] == found[1]
    assert [each[0] for each in found[0][0]] == ["trial-0", "trial-1"]


class Worker(ModuleType):
    """A stand-in for ray.tune: runs each trial on a copy of the Trainer, and again from its last
    checkpoint if it is `interrupted_at` a report.
    """

    def __init__(self, folder: Path, interrupted_at: int) -> None:
        super().__init__("ray.tune")
        self.folder, self.interrupted_at = folder, interrupted_at
        self.reports: list[dict[str, Any]] = []
        self.kept: Path | None = None
        self.Checkpoint = SimpleNamespace(from_directory=Path)

    def with_parameters(self, function: Any, local_trainer: Any) -> Any:
        stored = copy.deepcopy(local_trainer)  # as pickled and sent to another process
        return lambda config: function(config, local_trainer=copy.deepcopy(stored))

    def run(self, trial: Any, config: dict[str, Any], num_samples: int, **options: Any) -> Any:
        try:
            trial(dict(config))
        except InterruptedError:
            trial(dict(config))
        result = {"objective": self.reports[-1]["objective"]}
        best = SimpleNamespace(trial_id="t0", last_result=result, config=config)
        return SimpleNamespace(get_best_trial=lambda **how: best)

    def report(self, metrics: dict[str, Any], checkpoint: Path | None) -> None:
        self.reports.append(metrics)
        if checkpoint is not None:
            self.kept = self.folder / f"report-{len(self.reports)}"
            shutil.copytree(checkpoint, self.kept)
        if len(self.reports) == self.interrupted_at:
            raise InterruptedError

    def get_checkpoint(self) -> Any:
        return self.kept and SimpleNamespace(as_directory=self._opened)

    @contextmanager
    def _opened(self) -> Iterator[str]:
        yield str(self.kept)

    def get_context(self) -> Any:
        return SimpleNamespace(get_trial_id=lambda: "t0")


def make_classifier() -> Classifier:
    return Classifier(0.2)


@pytest.mark.row("H13", "H3")
def test_a_trial_of_ray_goes_on_from_what_it_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("ray")
    package.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "ray", package)
    curves = []
    for interrupted_at in (0, 3):
        worker = package.tune = Worker(tmp_path / str(interrupted_at), interrupted_at)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ray.tune", worker)
        each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
        args = {**ARGUMENTS, **each, "save_steps": 2, "max_steps": 4}
        trainer = Trainer(
            None,
            TrainingArguments(str(tmp_path / f"runs-{interrupted_at}"), **args),
            train_dataset=samples(16),
            eval_dataset=samples(8),
            model_init=make_classifier,
        )
        best = trainer.hyperparameter_search(
            lambda trial: {"learning_rate": 0.03}, backend="ray", n_trials=1
        )
        assert not isinstance(best, list) and best is not None and best.run_id == "t0"
        curves.append({report["epoch"]: report["objective"] for report in worker.reports})
    assert curves[0] == curves[1] and len(curves[0]) == 4
    assert len(worker.reports) == 4 + 1  # the third step twice: it was saved at the second
