"""Files of models and checkpoints as other programs write them: safetensors, and trainings of plain torch as DeepSpeed's ranks,
Accelerate, Lightning and transformers save them.

The files of DeepSpeed have the structure of those that DeepSpeed 0.19.8 has written with 2 and 3 ranks."""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors import TensorSpec, serialize_file


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    full = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    entries = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in full.items()
    }
    serialize_file(entries, str(path), {"format": "pt"})


def save_in_parts(folder: Path, tensors: Mapping[str, torch.Tensor], parts: int) -> None:
    """Save the tensors in several files, with the index that Hugging Face writes."""
    names = list(tensors)
    where = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        mine = names[part::parts]
        save(folder / file, {name: tensors[name] for name in mine})
        where |= {name: file for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


MOMENTS = ("exp_avg", "exp_avg_sq")
CLASSES = ("deepspeed.utils.tensor_fragment.fragment_address", "deepspeed.runtime.fp16.loss_scaler.LossScaler")


@contextmanager
def classes(*names):
    """Make classes that cannot be imported after this block."""
    modules, made = {}, []
    for name in names:
        module, _, word = name.rpartition(".")
        made.append(type(word, (), {"__module__": module}))
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), types.SimpleNamespace())
        setattr(modules[module], word, made[-1])
    with mock.patch.dict(sys.modules, modules):
        yield made


def state_of(run, parameter):
    """Return the state of a parameter; DeepSpeed keeps zeros of one that never got a gradient."""
    own = run.optimizer.state.get(parameter, {})
    return {moment: own.get(moment, torch.zeros_like(parameter)).detach() for moment in MOMENTS}


def groups_of(run):
    """Return the trained parameters of each group, by name."""
    names = {id(each): name for name, each in run.model.named_parameters()}
    groups = [[each for each in group["params"] if each.requires_grad] for group in run.optimizer.param_groups]
    return [{names[id(each)]: each for each in group} for group in groups]


def model_states(run, stage, ranks):
    """Return the content of the model's files: one in stages 1 and 2, one of each rank in stage 3."""
    kept = run.model.state_dict()
    buffers = {name: each for name, each in run.model.named_buffers() if name in kept}
    names = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    aliases = names - {name for name, _ in run.model.named_parameters()}
    frozen = {name: each.detach() for name, each in run.model.named_parameters() if not each.requires_grad}
    common = {
        "buffer_names": list(buffers),
        "param_shapes": [{name: each.shape for name, each in group.items()} for group in groups_of(run)],
        "frozen_param_shapes": {name: each.shape for name, each in frozen.items()} if stage > 1 else None,
        "shared_params": {name: "another" for name in aliases},
        "global_steps": 3,
    }
    if stage < 3:
        return [{"module": run.model.state_dict(), "frozen_param_fragments": frozen if stage == 2 else None, **common}]
    shares = {name: split(each, ranks) for name, each in frozen.items()}
    return [
        {
            "module": {name: buffers.get(name, torch.empty(0)) for name in run.model.state_dict()},
            "frozen_param_fragments": {name: each[rank] for name, each in shares.items()},
            **common,
        }
        for rank in range(ranks)
    ]


def split(tensor, ranks):
    """Return the flat parts of a tensor, all of the same size."""
    flat = tensor.detach().reshape(-1)
    share = -(-flat.numel() // ranks)
    return list(torch.cat([flat, flat.new_zeros(share * ranks - flat.numel())]).view(ranks, share).clone())


def as_zero(folder, run, stage=2, ranks=2, paddings=True):
    """Write a checkpoint of DeepSpeed's engine. With `paddings`, there are unused elements between the parameters of stages 1
    and 2, as round_robin_gradients leaves them; without, the files say where each parameter is instead, as older ones do."""
    place = folder / "global_step3"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    for rank, content in enumerate(model_states(run, stage, ranks)):
        torch.save(content, place / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt")
    with classes(*CLASSES) as (address, scaler):
        for rank in range(ranks):
            own = of_stage_3(run, rank, ranks) if stage == 3 else of_stage_2(run, rank, ranks, paddings, address)
            own |= {"loss_scaler": scaler(), "zero_stage": stage}
            torch.save({"optimizer_state_dict": own}, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def optimizer_of(flats, step=3.0):
    return {
        "state": {number: {"step": torch.tensor(step), **moments} for number, moments in enumerate(flats)},
        "param_groups": [{"lr": 1e-2, "params": [number]} for number in range(len(flats))],
    }


def of_stage_3(run, rank, ranks):
    masters, moments = [], []
    for group in groups_of(run):
        masters.append(torch.cat([split(each, ranks)[rank] for each in group.values()]))
        parts = {key: [split(state_of(run, each)[key], ranks)[rank] for each in group.values()] for key in MOMENTS}
        moments.append({key: torch.cat(each) for key, each in parts.items()})
    return {"fp32_flat_groups": masters, "optimizer_state_dict": optimizer_of(moments), "partition_count": ranks}


def of_stage_2(run, rank, ranks, paddings, address):
    masters, moments, mappings, gaps = [], [], [], []
    for group in groups_of(run):
        gap = [(number % 3 if paddings else 0) for number in range(len(group))]
        flats = {key: [] for key in ("fp32", *MOMENTS)}
        for each, more in zip(group.values(), gap):
            for key, values in {"fp32": each.detach(), **state_of(run, each)}.items():
                flats[key] += [values.reshape(-1), torch.full((more,), 9.0)]
        flat = {key: torch.cat(each) for key, each in flats.items()}
        used = flat["fp32"].numel()
        shares = {key: split(each, ranks) for key, each in flat.items()}
        share = shares["fp32"][rank].numel()
        masters.append(shares["fp32"][rank][: max(0, used - rank * share)].clone())
        moments.append({key: shares[key][rank] for key in MOMENTS})
        mappings.append(mapping_of(group, rank * share, share, address))
        gaps.append(gap)
    found = {"single_partition_of_fp32_groups": masters, "base_optimizer_state": optimizer_of(moments)}
    found |= {"partition_count": [ranks] * len(masters), "param_slice_mappings": mappings}
    return found | ({"param_alignment_paddings": gaps} if paddings else {})


def mapping_of(group, begin, count, address):
    """Return where each parameter is in a rank's range of a group without paddings."""
    found, first = {}, 0
    for name, each in group.items():
        low, high = max(first, begin), min(first + each.numel(), begin + count)
        if low < high:
            found[name] = address()
            found[name].start, found[name].numel = low - begin, high - low
        first += each.numel()
    return found


def optimizer_state(run, named):
    """Return the optimizer's state_dict(), with the names that torch adds if the optimizer was made with them."""
    found = copy.deepcopy(run.optimizer.state_dict())
    names = {id(each): name for name, each in run.model.named_parameters()}
    for group, own in zip(found["param_groups"], run.optimizer.param_groups):
        group.pop("param_names", None)
        if named:
            group["param_names"] = [names[id(each)] for each in own["params"]]
    return found


def as_transformers(folder, run, named=True):
    """Write weights in two files with an index, and the optimizer's state in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(run.model.state_dict().items())
    half, places = len(everything) // 2, {}
    for number, part in enumerate((everything[:half], everything[half:]), start=1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save(dict(part), folder / file)
        places |= dict.fromkeys(dict(part), file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    torch.save(optimizer_state(run, named), folder / "optimizer.pt")
