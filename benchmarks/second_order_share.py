"""The second-order term's share of the hypergradient, by each way to it and in each precision.

PF2LoRA on SST-2, after two rounds in float32. "step α" is the difference with the step α alone; in 16 bits the method
takes a longer one (`methods/bilevel.py`).

PYTHONPATH=src python benchmarks/second_order_share.py --model carry/minilm
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
import transformers
from timing import machine, versions

from pf2lora.core.hypergradient import bilevel
from pf2lora.data.spec import DataSpec
from pf2lora.engines.local import train
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run import trial as trials
from pf2lora.run.config import Config
from pf2lora.run.experiment import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="/work/shared/data/glue_sst2", help="folder of GLUE's SST-2")
    parser.add_argument("--model", required=True, help="a model folder (benchmarks/models.py makes them)")
    parser.add_argument("--client-lr", type=float, nargs="+", default=[0.03, 0.001])
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    data = DataSpec(dataset="sst2", data_dir=given.data, num_clients=2, heterogeneity=0.5)
    base = Config(model=given.model, rounds=2, data=data)
    print(f"{'α':>6} {'precision':10}{'exact':>20}{'difference, step α':>22}{'difference':>20}")
    for alpha in given.client_lr:
        state = None
        for precision in ("float32", "bfloat16"):
            workload = prepare(replace(base, precision=precision, client_lr=alpha))
            trial = trials.set_up(workload, "pf2lora", 0)
            method = trial.method
            assert isinstance(method, PF2LoRA)
            if state is None:
                *_, last = train(
                    method,
                    trial.F,
                    trial.state,
                    trial.source,
                    trials.schedule_of(workload.config, 0),
                    device=workload.device,
                )
                state = last.served
            inner, outer = (trial.source.draw([0, 1], [40 + d] * 2) for d in range(2))
            found = []
            for way, shift in (("exact", None), ("difference", None), ("difference", method.shift(state.y))):
                hyper = bilevel(trial.F, state.x, state.y, alpha, way, inner, outer, outer, inner, shift)
                assert hyper.share is not None
                found.append(" ".join(f"{share:.1e}" for share in hyper.share.tolist()))
            print(f"{alpha:6g} {precision:10}{found[0]:>20}{found[1]:>22}{found[2]:>20}", flush=True)
            trial.model.remove()
    print(f"{machine(torch.device(workload.device))}; {versions('torch', 'transformers')}")


if __name__ == "__main__":
    main()
