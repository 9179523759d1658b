"""Carries the experiment out: makes the model, starts the three servers one after the other, sends requests, counts.

One server at a time; every wait has a deadline; every server is ended whatever happens.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from kvbm.demo import counters, workload
from kvbm.demo.client import Client, Likelihoods, RequestError
from kvbm.demo.report import AnsweredRequest, Results, Run, measure_difference
from kvbm.demo.runs import (
    SERVED_NAME,
    Options,
    RunSpec,
    describe_machine,
    make_arguments,
    make_environment,
    make_runs,
    make_workload,
)
from kvbm.demo.server import HOST, Server, free_port, make_vllm_command
from kvbm.settings import process_environment
from kvbm.testing.tiny_model import make_model

if TYPE_CHECKING:
    from kvbm.demo.progress import Reporter
    from kvbm.testing.tiny_model import DType, Size

IDLE_WAIT_S_MAX = 10.0
IDLE_STEP_S = 0.3
ROUGH_CHARACTERS_PER_TOKEN = 8
EXPECTED_TIME = "about 3 minutes on 2 CPU cores"
"""Measured with the demo's own model."""


def run_experiment(options: Options, reporter: Reporter) -> Results:
    """All runs of the experiment; the others are compared with the first.

    Raises ServerError (a server did not start, died or did not answer), OSError and ValueError.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    load = make_workload(options)
    disk_dir = Path(tempfile.mkdtemp(prefix="kv-disk-", dir=options.output.absolute()))
    try:
        specs = make_runs(load, disk_dir, (free_port(), free_port()))
        runs = _run_all(options, load, specs, reporter)
    finally:
        shutil.rmtree(disk_dir, ignore_errors=True)
    settings = {
        "model": options.model or f"random-weight Qwen3 {options.model_size!r}",
        "dtype": options.dtype,
        "load": f"{load.request_count} requests about {load.document_count} documents of {load.prefix_tokens:,} tokens,"
        f" {load.max_tokens} tokens each, greedy, one at a time",
        "device cache": f"{load.device_blocks} blocks of {load.block_tokens} tokens: one request at a time",
        "working set": f"{load.working_set_blocks} blocks",
    }
    return Results(machine=describe_machine(options.cuda_device), settings=settings, runs=runs)


def _run_all(
    options: Options, load: workload.Workload, specs: tuple[RunSpec, ...], reporter: Reporter
) -> tuple[Run, ...]:
    """All runs, one after the other; what is left takes about the mean of the runs before."""
    reporter.step("making the model")
    experiment = _Experiment(options, load, reporter)
    usual = options.model is None and not (options.short or options.cuda_device)
    reporter.say(f"{len(specs)} servers, one after the other" + (f": {EXPECTED_TIME}" if usual else ""))
    runs: list[Run] = []
    began_s = time.monotonic()
    for spec in specs:
        runs.append(experiment.run(spec))
        left = len(specs) - len(runs)
        each_s = (time.monotonic() - began_s) / len(runs)
        reporter.say(f"{spec.title}: done" + (f"; about {each_s * left:.0f} s to go" if left else ""))
    return tuple(runs)


class _Experiment:
    """The state that runs share: the documents' texts, cut once by the first server's tokenizer, and its answers."""

    def __init__(self, options: Options, load: workload.Workload, reporter: Reporter) -> None:
        self._options = options
        self._load = load
        self._reporter = reporter
        self._asks = workload.schedule(load.document_count, load.request_count)
        self._prefixes: list[str] = []
        self._reference: tuple[AnsweredRequest, ...] = ()
        self._local = options.model is None or Path(options.model).is_dir()
        if options.model is not None:
            self._model = str(Path(options.model).absolute()) if self._local else options.model
        else:
            size = cast("Size", options.model_size)
            dtype: DType = "float32" if options.dtype == "float32" else "bfloat16"
            self._model = str(make_model(options.output / "models" / f"{size}-{dtype}", size, dtype))

    def run(self, spec: RunSpec) -> Run:
        """One server from start to end."""
        options, inherited = self._options, dict(process_environment())
        self._reporter.step(f"{spec.title}: starting vllm serve")
        port = free_port()
        server = Server(
            "vllm serve",
            make_vllm_command(self._model, port, make_arguments(self._load, spec, options.dtype)),
            port,
            make_environment(spec, inherited, cuda=bool(options.cuda_device), local_model=self._local),
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

    def _measure(self, spec: RunSpec, server: Server) -> Run:
        kvbm = Client(HOST, spec.metrics_port, timeout_s=10.0) if spec.metrics_port is not None else None
        if not self._prefixes:
            names = (*workload.DOCUMENTS[: self._load.document_count], workload.WARM_UP_DOCUMENT)
            self._prefixes = [self._cut_document(server.client, name) for name in names]
        # The first use of a shape costs time that no later request pays, so it is not measured.
        for question in range(2):
            self._ask(server.client, workload.Ask(document=-1, question=question, seen=False))
        _wait_until_idle(kvbm)
        engine_before, kvbm_before = counters.read(server.client.page()), _read_page(kvbm)
        self._reporter.step(f"{spec.title}: asking", total=len(self._asks))
        requests: list[AnsweredRequest] = []
        for done, ask in enumerate(self._asks, start=1):
            last = self._ask(server.client, ask)
            requests.append(last)
            note = f"first token after {last.ttft_s * 1e3:,.0f} ms, {last.cached_tokens:,} tokens cached"
            self._reporter.advance(done, len(self._asks), note)
        _wait_until_idle(kvbm)
        engine = counters.difference(engine_before, counters.read(server.client.page()))
        moved = counters.difference(kvbm_before, _read_page(kvbm))
        self._reference = self._reference or tuple(requests)

        def recompute(request: AnsweredRequest, count: int) -> tuple[tuple[int, ...], Likelihoods]:
            messages = workload.messages(self._prefixes[request.document], request.question)
            return server.client.likelihoods(SERVED_NAME, messages, count, salt="anew")

        return Run(
            name=spec.name,
            title=spec.title,
            environment=spec.environment,
            required_tier=spec.tier,
            start_s=round(server.start_s, 2),
            requests=tuple(
                measure_difference(recompute, *pair) for pair in zip(self._reference, requests, strict=True)
            ),
            hit_tokens=counters.hit_tokens(engine, moved, self._load.block_tokens),
        )

    def _ask(self, client: Client, ask: workload.Ask) -> AnsweredRequest:
        messages = workload.messages(self._prefixes[ask.document], ask.question)
        answer = client.chat(SERVED_NAME, messages, self._load.max_tokens)
        return AnsweredRequest(
            document=ask.document, question=ask.question, seen=ask.seen, **msgspec.structs.asdict(answer)
        )

    def _cut_document(self, client: Client, name: str) -> str:
        """A document of the wanted length in the model's own tokens; a short one is repeated."""
        wanted = self._load.prefix_tokens
        text = workload.document_text(name)
        text *= -(-wanted * ROUGH_CHARACTERS_PER_TOKEN // len(text))
        tokens = client.token_ids(SERVED_NAME, text[: wanted * ROUGH_CHARACTERS_PER_TOKEN])
        return client.text_of(SERVED_NAME, tokens[:wanted])


def _read_page(kvbm: Client | None) -> counters.Readings:
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
