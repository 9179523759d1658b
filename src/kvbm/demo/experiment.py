"""Carries the experiment out: makes the model, starts the three servers one after the other, asks, counts.

One server at a time; every wait has a deadline; every server is ended whatever happens.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvbm.demo import counters, workload
from kvbm.demo.client import Answer, Client, Likelihoods, RequestError
from kvbm.demo.machine import describe
from kvbm.demo.options import (
    SERVED_NAME,
    Options,
    RunSpec,
    own_model_size,
    server_arguments,
    server_environment,
    three_runs,
    workload_for,
)
from kvbm.demo.report import AnsweredRequest, Results, Run
from kvbm.demo.server import HOST, VllmServer, free_port
from kvbm.demo.ties import apart
from kvbm.settings import process_environment
from kvbm.testing.tiny_model import SHAPES, make_model

if TYPE_CHECKING:
    from kvbm.demo.progress import Reporter
    from kvbm.testing.tiny_model import DType, Size

IDLE_WAIT_S_MAX = 10.0
IDLE_STEP_S = 0.3
ROUGH_CHARACTERS_PER_TOKEN = 8
EXPECTED_TIME = "about 3 minutes on 2 CPU cores"
"""Measured with the demo's own model."""

ChooseRuns = Callable[[workload.Workload, Path, tuple[int, int]], tuple[RunSpec, ...]]
"""Gives the runs for these sizes, an empty directory for a disk tier, and two free ports."""


def run_experiment(options: Options, reporter: Reporter, choose_runs: ChooseRuns = three_runs) -> Results:
    """All runs of the experiment. `choose_runs` gives them; the others are compared with the first.

    Raises ServerError (a server did not start, died or did not answer), OSError and ValueError.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    load = workload_for(options)
    reporter.step("making the model")
    model, local = _model(options)
    disk_dir = Path(tempfile.mkdtemp(prefix="kv-disk-", dir=options.output.absolute()))
    try:
        chosen = choose_runs(load, disk_dir, (free_port(), free_port()))
        experiment = _Experiment(options, load, model, local, reporter)
        usual = options.model is None and not (options.short or options.cuda)
        reporter.say(f"{len(chosen)} servers, one after the other" + (f": {EXPECTED_TIME}" if usual else ""))
        runs = _run_each(experiment, chosen, reporter)
    finally:
        shutil.rmtree(disk_dir, ignore_errors=True)
    settings: dict[str, str | int] = {
        "model": options.model or _own_model_words(options),
        "dtype": options.dtype,
        "load": f"{load.request_count} requests about {load.document_count} documents of {load.prefix_tokens:,} tokens,"
        f" {load.max_tokens} tokens each, greedy, one at a time",
        "device cache": f"{load.device_blocks} blocks of {load.block_tokens} tokens: one request at a time",
        "working set": f"{load.working_set_blocks} blocks",
    }
    return Results(machine=describe(options.cuda_device), settings=settings, runs=runs)


def _run_each(experiment: _Experiment, chosen: tuple[RunSpec, ...], reporter: Reporter) -> tuple[Run, ...]:
    """All runs, one after the other; what is left takes about the mean of the runs before."""
    runs: list[Run] = []
    began_s = time.monotonic()
    for spec in chosen:
        runs.append(experiment.run(spec))
        left = len(chosen) - len(runs)
        each_s = (time.monotonic() - began_s) / len(runs)
        reporter.say(f"{spec.title}: done" + (f"; about {each_s * left:.0f} s to go" if left else ""))
    return tuple(runs)


def _own_model_words(options: Options) -> str:
    size = cast("Size", own_model_size(options))
    shape = SHAPES[size]
    return f"random-weight Qwen3 {size!r}: {shape.layers} layers, hidden size {shape.hidden}"


def _model(options: Options) -> tuple[str, bool]:
    """The model to serve, and whether it is on this machine."""
    if options.model is not None:
        local = Path(options.model).is_dir()
        return (str(Path(options.model).absolute()) if local else options.model), local
    size = cast("Size", own_model_size(options))
    dtype: DType = "float32" if options.dtype == "float32" else "bfloat16"
    return str(make_model(options.output / "models" / f"{size}-{dtype}", size, dtype)), True


class _Experiment:
    """The state that runs share: the documents' texts, cut once, by the first server's tokenizer."""

    def __init__(
        self, options: Options, load: workload.Workload, model: str, local: bool, reporter: Reporter
    ) -> None:
        self._options = options
        self._load = load
        self._model = model
        self._local = local
        self._reporter = reporter
        self._asks = workload.schedule(load.document_count, load.request_count)
        self._prefixes: list[str] = []
        self._warm_up_prefix = ""
        self._reference: tuple[AnsweredRequest, ...] = ()

    def run(self, spec: RunSpec) -> Run:
        """One server from start to end."""
        options = self._options
        self._reporter.step(f"{spec.title}: starting vllm serve")
        server = VllmServer(
            self._model,
            server_arguments(self._load, spec, options.dtype),
            server_environment(spec, dict(process_environment()), cuda=options.cuda, local_model=self._local),
            options.output / f"{spec.name}.log",
            start_timeout_s=options.start_timeout_s,
            request_timeout_s=options.request_timeout_s,
            while_starting=self._reporter.waiting,
        )
        with server:
            try:
                return self._measure(spec, server)
            except RequestError as error:
                raise server.failure(f"{spec.title}: {error}") from error

    def _measure(self, spec: RunSpec, server: VllmServer) -> Run:
        kvbm = Client(HOST, spec.metrics_port, timeout_s=10.0) if spec.metrics_port is not None else None
        if not self._prefixes:
            self._cut_documents(server.client)
        # First use of a shape costs time that no later request pays: it is not to be measured here.
        for question in range(2):
            self._chat(server.client, self._warm_up_prefix, question)
        _wait_until_idle(kvbm)
        engine_before, kvbm_before = counters.read(server.client.page()), _page(kvbm)
        self._reporter.step(f"{spec.title}: asking", total=len(self._asks))
        requests: list[AnsweredRequest] = []
        for done, ask in enumerate(self._asks, start=1):
            requests.append(self._ask(server.client, ask))
            last = requests[-1]
            note = f"first token after {last.ttft_s * 1e3:,.0f} ms, {last.cached_tokens:,} tokens cached"
            self._reporter.advance(done, len(self._asks), note)
        _wait_until_idle(kvbm)
        engine = counters.difference(engine_before, counters.read(server.client.page()))
        moved = counters.difference(kvbm_before, _page(kvbm))
        answered = self._judged(server.client, requests)
        return Run(
            name=spec.name,
            title=spec.title,
            environment=spec.environment,
            required_tiers=spec.required_tiers,
            start_s=round(server.start_s, 2),
            requests=answered,
            hit_tokens=counters.hit_tokens(engine, moved, self._load.block_tokens),
            bytes_moved=counters.bytes_moved(moved),
            counters=counters.named(moved, "kvbm_"),
        )

    def _judged(self, client: Client, requests: list[AnsweredRequest]) -> tuple[AnsweredRequest, ...]:
        """The answers; those that differ from the first run's with a measure of it, as rounding may have decided."""
        if not self._reference:
            self._reference = tuple(requests)

        def anew(request: AnsweredRequest, count: int) -> Likelihoods:
            messages = workload.messages(self._prefixes[request.document], request.question)
            return client.likelihoods(SERVED_NAME, messages, count, salt="computed anew")

        return tuple(apart(anew, *pair) for pair in zip(self._reference, requests, strict=True))

    def _chat(self, client: Client, prefix: str, question: int) -> Answer:
        return client.chat(SERVED_NAME, workload.messages(prefix, question), self._load.max_tokens)

    def _ask(self, client: Client, ask: workload.Ask) -> AnsweredRequest:
        answer = self._chat(client, self._prefixes[ask.document], ask.question)
        return AnsweredRequest(
            document=ask.document,
            question=ask.question,
            seen=ask.seen,
            ttft_s=answer.ttft_s,
            total_s=answer.total_s,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            text=answer.text,
            token_ids=answer.token_ids,
        )

    def _cut_documents(self, client: Client) -> None:
        names = workload.DOCUMENTS[: self._load.document_count]
        self._prefixes = [self._cut(client, name) for name in names]
        self._warm_up_prefix = self._cut(client, workload.WARM_UP_DOCUMENT)

    def _cut(self, client: Client, name: str) -> str:
        """A document of the wanted length in the model's own tokens; a short one is repeated."""
        wanted = self._load.prefix_tokens
        text = workload.document_text(name)
        text *= -(-wanted * ROUGH_CHARACTERS_PER_TOKEN // len(text))
        tokens = client.token_ids(SERVED_NAME, text[: wanted * ROUGH_CHARACTERS_PER_TOKEN])
        return client.text_of(SERVED_NAME, tokens[:wanted])


def _page(kvbm: Client | None) -> counters.Readings:
    return counters.read(kvbm.page()) if kvbm is not None else {}


def _wait_until_idle(kvbm: Client | None) -> None:
    """Wait until no more bytes move: stores run beside the requests and end after them. Bounded."""
    deadline = time.monotonic() + IDLE_WAIT_S_MAX
    last = None
    while kvbm is not None and time.monotonic() < deadline:
        moved = counters.total(counters.read(kvbm.page()), "kvbm_transfer_bytes")
        if moved == last:
            return
        last = moved
        time.sleep(IDLE_STEP_S)
