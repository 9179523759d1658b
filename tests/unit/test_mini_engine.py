"""`examples/mini_engine.py`: equal outputs with and without eviction, from all tiers.

tests/engine/test_mini_engine.py compares them with those of transformers.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import tokenizers
import torch
from typer.testing import CliRunner

import kvbm
from kvbm.testing.tiny_model import make_model
from rigs.mini_engine import EXAMPLE, mini, numbers, serve

assert safetensors and tokenizers, "what the example and its model need"

SMALL: dict[str, Any] = {"conversations": 3, "turns": 2, "batch": 2}
DEVICE_BLOCKS = 40  # little more than one conversation takes at its end
GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The models' matrices are too small to be shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mini") / "tiny", "tiny", "float32")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return mini.Model.load(directory)


def small_model(device: str = "cpu", **changes: Any) -> Any:
    """A model of another seed and shape, in no file."""
    shape = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return mini.Model.random(mini.Config(**{**shape, "qk_norm": True, **changes}), device, torch.float32)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_outputs_are_equal_with_and_without_eviction(seed: int, device: str) -> None:
    plain, evicting, kept = mini.compare(
        small_model(device), **SMALL, device_blocks=DEVICE_BLOCKS, seed=seed, host="16MB"
    )
    assert evicting.talks == plain.talks
    assert kept.talks == plain.talks
    onboarded, computed, found = "blocks onboarded", "prefill tokens computed", "blocks found on device"
    assert plain.counts[onboarded] == evicting.counts[onboarded] == 0
    assert kept.counts[onboarded] > 0
    # What the device still holds is not loaded: KVBM brings exactly what was evicted.
    assert kept.counts[found] == evicting.counts[found] > 0
    assert kept.counts[found] + kept.counts[onboarded] == plain.counts[found]
    assert kept.counts[computed] == plain.counts[computed] < evicting.counts[computed]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_from_disk_and_after_a_restart(tmp_path: Path, device: str) -> None:
    model = small_model(device)
    # Host memory for little more than one prompt: most of what comes back comes from disk.
    tiers = {"host": "320KB", "disk": "32MB", "disk_dir": str(tmp_path)}
    plain, _, kept = mini.compare(model, **SMALL, device_blocks=DEVICE_BLOCKS, **tiers)
    assert kept.talks == plain.talks
    engine = mini.Engine(model, DEVICE_BLOCKS)
    with kvbm.BlockManager(engine.layout, namespace=engine.namespace, **tiers) as engine.manager:
        assert mini.converse(engine, **SMALL, seed=0) == plain.talks
        moved = engine.manager.metrics.value("kvbm_transfer_bytes_total", source="disk", target="host")
    assert moved > 0
    # All but the very first turns' last blocks were there: the run before had computed everything.
    assert engine.counts["prefill tokens computed"] < plain.counts["prefill tokens computed"] / 4
    assert engine.counts["blocks onboarded"] > 0


def test_wrong_kv_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a load that leaves one block as it was."""
    onboard = kvbm.Hit.onboard

    def forgetful(hit: kvbm.Hit, kv_cache: Any, device_blocks: list[int]) -> int:
        before = kv_cache["kv"][device_blocks[0]].clone()
        arrived = onboard(hit, kv_cache, device_blocks)
        kv_cache["kv"][device_blocks[0]] = before.flip(0)
        return arrived

    monkeypatch.setattr(kvbm.Hit, "onboard", forgetful)
    plain, _, kept = mini.compare(small_model(), **SMALL, device_blocks=DEVICE_BLOCKS, host="16MB")
    assert kept.counts["blocks onboarded"] > 0
    assert kept.talks != plain.talks


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "tied": True}], ids=["qwen3", "llama"])
def test_decoded_and_prefilled_kv_are_equal_to_the_bit(changes: dict[str, Any]) -> None:
    """Whatever ran beside them: one batch decodes four sequences, then each is prefilled alone."""
    model = small_model(**changes)
    together = mini.Engine(model, 64)
    requests = [mini.Request(numbers(seed, 17 + 5 * seed), 40) for seed in range(4)]
    together.serve(requests, 4)
    for request in requests:
        alone = mini.Engine(model, 64)
        alone.serve([mini.Request(request.tokens, 1)])
        keys = kvbm.Chain(alone.layout, alone.namespace, request.tokens[:-1]).keys
        assert keys == request.chain.keys
        found, expected = together._blocks.find(keys), alone._blocks.find(keys)
        assert len(found) == len(expected) == (len(request.tokens) - 1) // 16 > 2
        assert torch.equal(together._kv[found], alone._kv[expected])


def test_batches_and_long_chunks_say_the_same_but_for_rounding(model: Any) -> None:
    prompts = [numbers(seed, 30 + 40 * seed) for seed in range(4)]
    exact, fast = (mini.Engine(model, 64, exact=exact) for exact in (True, False))
    assert serve(fast, prompts) == serve(exact, prompts)


def test_a_prompt_that_is_all_there_computes_its_last_block_only(model: Any) -> None:
    engine, prompt = mini.Engine(model, 16), numbers(5, 64)
    assert serve(engine, [prompt], 4) == serve(engine, [prompt], 4)
    assert engine.counts["prefill tokens computed"] == 64 + 16
    assert engine.counts["blocks found on device"] == 3


def test_device_blocks_are_free_idle_or_used() -> None:
    """Against what was written last: a block that is found still holds what its key says."""
    rng, blocks = random.Random(1), mini.DeviceBlocks(12)
    written: dict[int, bytes] = {}
    used: list[list[int]] = []
    hits = 0
    for _ in range(3000):
        if used and rng.random() < 0.5:
            blocks.release(used.pop(rng.randrange(len(used))))
            continue
        keys = [bytes([rng.randrange(3), i]) for i in range(rng.randint(1, 4))]
        if len(keys) > blocks.available:
            continue
        held = blocks.find(keys) if rng.random() < 0.7 else []
        assert [written[block] for block in held] == keys[: len(held)]
        hits += len(held)
        fresh = blocks.allocate(len(keys) - len(held))
        assert not {*fresh} & {block for others in [*used, held] for block in others}
        written.update(zip(fresh, keys[len(held) :], strict=True))
        blocks.publish(keys, held + fresh)
        used.append(held + fresh)
        assert blocks.available == 12 - len({block for others in used for block in others})
    assert hits > 500


def test_a_request_ends_at_a_stop_token(model: Any) -> None:
    engine, prompt = mini.Engine(model, 16), numbers(6, 20)
    (whole,) = serve(engine, [prompt], 12)
    request = mini.Request(prompt, 12, stop=frozenset(whole[5:6]))
    engine.serve([request])
    assert request.output == whole[: whole.index(whole[5]) + 1]
    assert engine._blocks.available == 16


def changed(tmp_path: Path, directory: Path, **changes: Any) -> Path:
    """The model with another config; None takes a line out."""
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    config = {**json.loads((directory / "config.json").read_text()), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2'; known: llama, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_hidden_layers": None}, "no 'num_hidden_layers' in config.json"),
        ({"num_hidden_layers": 3}, r"model.layers.2.input_layernorm.weight is missing, expected \[256\]"),
        ({"vocab_size": 4095}, r"model.embed_tokens.weight is \[4096, 256\], expected \[4095, 256\]"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_in_one_line(
    tmp_path: Path, directory: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(kvbm.SettingsError, match=named) as error:
        mini.Model.load(changed(tmp_path, directory, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["nothing", "no weights", "torn weights", "config of no use"])
def test_a_directory_that_is_no_model_is_refused_in_one_line(
    tmp_path: Path, directory: Path, what: str
) -> None:
    if what != "nothing":
        changed(tmp_path, directory)
        (tmp_path / "model.safetensors").unlink()
    if what == "torn weights":
        (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:1000])
    if what == "config of no use":
        (tmp_path / "config.json").write_text("[]")
    with pytest.raises(kvbm.SettingsError, match="a Llama or Qwen3 directory") as error:
        mini.Model.load(tmp_path)
    assert "\n" not in str(error.value)


def test_other_weights_are_another_namespace(tmp_path: Path, directory: Path, model: Any) -> None:
    engine = mini.Engine(model, 4)
    again = mini.Engine(mini.Model.load(directory), 4)
    assert again.namespace == engine.namespace
    other = mini.Engine(mini.Model.load(changed(tmp_path, directory, rms_norm_eps=1e-5)), 4)
    assert other.namespace.fingerprint != engine.namespace.fingerprint
    half = mini.Engine(mini.Model.load(directory, dtype=torch.bfloat16), 4)
    assert half.namespace.fingerprint != engine.namespace.fingerprint


def test_a_request_that_never_fits_is_refused(model: Any) -> None:
    with pytest.raises(kvbm.SettingsError, match="device_blocks=4 cannot be used: this request needs 6"):
        mini.Engine(model, 4).serve([mini.Request(numbers(1, 80), 16)])


def test_a_wrong_directory_ends_the_command_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(tmp_path), "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode != 0
    assert ended.stderr.startswith("mini_engine: model=") and ended.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_device_that_is_not_there_ends_the_command_with_one_line() -> None:
    ended = subprocess.run([sys.executable, str(EXAMPLE), "--device", "cuda"], capture_output=True, text=True)
    assert ended.returncode != 0 and not ended.stdout
    assert ended.stderr == (
        "mini_engine: device='cuda' cannot be used: torch finds no CUDA device here; accepted: cpu\n"
    )


def test_help_is_there_without_a_model() -> None:
    app = mini.typer.Typer()
    app.command()(mini.main)
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0 and "serve conversations three times" in shown.output.lower()


def test_the_guide_quotes_what_is_there() -> None:
    guide = (EXAMPLE.parents[1] / "docs" / "guides" / "embedding.md").read_text()
    others = [
        EXAMPLE.with_name(name).read_text()
        for name in ("shared_library.py", "store_library.py", "hybrid_library.py")
    ]
    source = [line.strip() for line in "".join((EXAMPLE.read_text(), *others)).splitlines()]
    excerpts = [block.split("```")[0].strip() for block in guide.split("```python\n")[1:]]
    assert len(excerpts) >= 5
    for excerpt in excerpts:
        lines = [line.strip() for line in excerpt.splitlines()]
        assert any(source[i : i + len(lines)] == lines for i in range(len(source))), excerpt


def test_main_prints_the_table_and_exits_by_the_outputs(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(mini.typer.Exit) as ended:
        mini.main(directory, device="cpu", conversations=2, turns=1, host="16MB")
    assert not ended.value.exit_code
    shown = capsys.readouterr().out
    assert shown.count("yes") == 3 and "blocks onboarded" in shown
    runs = [mini.Run(str(talk), mini.Counter(), 0.0, 0.0, [[talk]]) for talk in (1, 1, 2)]
    monkeypatch.setattr(mini, "compare", lambda *args, **options: runs)
    with pytest.raises(mini.typer.Exit) as ended:
        mini.main(directory, device="cpu")
    assert ended.value.exit_code
    assert "NO" in capsys.readouterr().out
