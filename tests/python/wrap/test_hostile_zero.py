"""Tests of damaged and forged checkpoints of DeepSpeed's ranks: each is refused before anything changes."""

import shutil

import ballast
import pytest
import torch
from ballast.tools.command_line import main
from python.wrap.support import others, saved
from python.wrap.support.loops import Loop, Tower

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
LAST = OPTIMIZER.format(1)
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """Return the folders of one training's checkpoints in stages 2 and 3, on two ranks."""
    run = Loop(make_model=Tower, steps=1).run()
    folders = {}
    for name, options in {"2": {}, "3": {"stage": 3}, "older": {"paddings": False}}.items():
        folders[name] = tmp_path_factory.mktemp("zero") / name
        others.as_zero(folders[name], run, **options)
    return folders


def rewritten(change, file=LAST):
    """Return a damage that changes what a file holds."""

    def damage(folder):
        with others.classes(*others.CLASSES):
            content = torch.load(folder / file, weights_only=False)
            change(content.get("optimizer_state_dict", content))
            torch.save(content, folder / file)

    return damage


def put(key, value, file=LAST):
    return rewritten(lambda own: own.__setitem__(key, value(own) if callable(value) else value), file)


def removed(file):
    return lambda folder: (folder / file).unlink()


def cut(file):
    def damage(folder):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2])

    return damage


def copied(file, to):
    return lambda folder: shutil.copyfile(folder / file, folder / to)


def without_optimizer(folder):
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()


def shorter(own):
    return [own["single_partition_of_fp32_groups"][0][:-9].clone()]


def without_a_name(own):
    return [{name: shape for name, shape in own["param_shapes"][0].items() if name != "position"}]


def twice(own):
    return [{**own["param_shapes"][0], "another": own["param_shapes"][0]["position"]}]


def of_size(size):
    return lambda own: [{**own["param_shapes"][0], "position": size}]


def moved(own):
    next(iter(own["param_slice_mappings"][0].values())).start = 1


def later(own):
    own["base_optimizer_state"]["state"][0]["step"] = torch.tensor(7.0)


def short_moment(own):
    own["base_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(3)


DAMAGES = {
    "no file of a rank": ("2", removed(OPTIMIZER.format(0)), "lacks the file of rank 0"),
    "no file of the last rank": ("2", removed(LAST), "lacks the file of rank 1"),
    "no model": ("2", removed(MODEL), "lacks the file with the model"),
    "no optimizer files": ("3", without_optimizer, "lacks the files of the ranks"),
    "no model of a rank": ("3", removed(f"zero_pp_rank_1_{MODEL}"), "rank 1 lacks its part of blocks.1"),
    "a rank too many": ("2", copied(LAST, OPTIMIZER.format(2)), "no rank 2"),
    "a rank twice": ("2", copied(LAST, f"bf16_{LAST}"), "rank 1 twice"),
    "cut off": ("2", cut(LAST), "cannot unpickle"),
    "empty": ("2", lambda folder: (folder / MODEL).write_bytes(b""), "no zip file"),
    "of another step": ("2", rewritten(later), "not of one checkpoint: they differ in steps"),
    "of other ranks": ("2", put("partition_count", [3]), "differ in ranks"),
    "masters too short": ("2", put("single_partition_of_fp32_groups", shorter), "each element of a parameter|not those of"),
    "moment too short": ("2", rewritten(short_moment), 'exp_avg is "a FileTensor"(.|\n)*a flat tensor of at least'),
    "no masters": ("2", rewritten(lambda own: own.pop("single_partition_of_fp32_groups")), "no master parameters"),
    "masters of text": ("2", put("single_partition_of_fp32_groups", ["a"]), r'fp32_groups\[0\] is "a"(.|\n)*a flat tensor'),
    "a name too few": ("2", put("param_shapes", without_a_name, MODEL), "paddings"),
    "a name twice": ("older", put("param_shapes", twice, MODEL), "another place|each element"),
    "larger": ("older", put("param_shapes", of_size((1 << 40,)), MODEL), "another place"),
    "negative": ("2", put("param_shapes", of_size((-16,)), MODEL), r"param_shapes\[0\].position\[0\] is -16"),
    "no shape": ("2", put("param_shapes", of_size("16"), MODEL), r'param_shapes\[0\].position is "16"'),
    "moved": ("older", rewritten(moved), "another place"),
    "of stage 3, larger": ("3", put("param_shapes", of_size((99,)), f"zero_pp_rank_0_{MODEL}"), "not those of its parameters"),
    "paddings of text": ("2", put("param_alignment_paddings", "ab"), 'param_alignment_paddings is "ab"'),
    "names of numbers": ("2", put("buffer_names", [3], MODEL), r"buffer_names\[0\] is 3"),
    "state of a number": ("2", put("base_optimizer_state", {"state": {0: 3}}), r"state\.0 is 3"),
}


def require_refused(folder, code, said):
    model = saved.other_parameters(Tower())
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for read in (lambda: ballast.load(model, folder), lambda: ballast.load_checkpoint(folder, model, optimizer)):
        with pytest.raises(ballast.Error, match=f"{code}(.|\n)*({said})"):
            read()
    assert main(["convert", str(folder), str(folder / "out")]) in (1, 2) and not (folder / "out").exists()
    assert saved.same(model.state_dict(), before)


def test_damaged_files_of_ranks_are_refused(genuine, tmp_path):
    for case, (kind, damage, said) in DAMAGES.items():
        folder = tmp_path / case
        shutil.copytree(genuine[kind], folder)
        damage(folder / "global_step3")
        try:
            require_refused(folder, "B3202", said)
        except BaseException as error:
            raise AssertionError(case) from error


def test_checkpoints_of_other_parallelism_are_refused_with_a_remedy(genuine, tmp_path):
    for name in ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "layer_03-model_00-model_states.pt"):
        folder = tmp_path / name
        shutil.copytree(genuine["2"], folder)
        (folder / "global_step3" / name).touch()
        require_refused(folder, "B1001", "parts of layers(.|\n)*ds_to_universal")
    shutil.copytree(genuine["2"], tmp_path / "experts")
    put("partition_count", [2, 1])(tmp_path / "experts" / "global_step3")
    require_refused(tmp_path / "experts", "B1001", "not all divided over the same ranks")


def test_no_code_of_a_file_runs(genuine, tmp_path):
    """Objects of unknown classes are passed over, and calls of functions make nothing."""
    shutil.copytree(genuine["2"], tmp_path / "checkpoint")
    folder = tmp_path / "checkpoint" / "global_step3"

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    content = torch.load(folder / MODEL, weights_only=True)
    torch.save({**content, "client": Evil()}, folder / MODEL)
    ballast.load(Tower(), tmp_path / "checkpoint")
    assert not (tmp_path / "written").exists()


def test_the_newest_checkpoint_of_a_directory_is_chosen(genuine, tmp_path):
    shutil.copytree(genuine["2"], tmp_path / "all")
    (tmp_path / "all" / "global_step1").mkdir()
    (tmp_path / "all" / "global_step1" / MODEL).write_bytes(b"")
    ballast.load(Tower(), tmp_path / "all")
    (tmp_path / "all" / "latest").unlink()
    require_refused(tmp_path / "all", "B1001", "cannot choose a checkpoint of DeepSpeed(.|\n)*global_step1, global_step3")
    for content in (b"\xff\xfe\0", b"x" * 1_000_000, b"a\nb", b"", b".."):
        (tmp_path / "all" / "latest").write_bytes(content)
        require_refused(tmp_path / "all", "B1001", "cannot choose a checkpoint of DeepSpeed")
