"""Nothing that is read can run: no pickle is written or loaded, and no text becomes code."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "feddpc"
#: Calls that run, or may run, what they are given; a name without a dot is a builtin.
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__"),
    *("pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps", "pickle.Pickler", "cloudpickle.loads"),
    *("cloudpickle.dumps", "dill.loads", "joblib.load", "joblib.dump", "marshal.loads", "shelve.open"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"),
    *("os.system", "os.popen", "shutil.unpack_archive"),
}
#: Methods of any object that unpack an archive onto the disk.
UNPACKS = {"extractall", "extract"}


def calls(text):
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def complaints(text, where):
    """Return what a module must not do, with lines."""
    found = []
    for call in calls(text):
        name, keys = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
        bad = name in FORBIDDEN or name.rpartition(".")[2] in UNPACKS
        bad |= name in ("np.load", "numpy.load") and keys.get("allow_pickle") != "False"
        bad |= keys.get("shell", "False") != "False" or keys.get("weights_only") == "False"
        if bad:
            found.append(f"{where}:{call.lineno}: {name}")
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        risky = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml"} & {n.partition(".")[0] for n in names}
        if risky:
            found.append(f"{where}:{node.lineno}: imports {', '.join(sorted(risky))}")
    return found


def test_nothing_that_is_read_can_run():
    modules = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    assert modules
    assert [line for where, text in modules.items() for line in complaints(text, where)] == []


@pytest.mark.parametrize(
    "text",
    [
        *("eval(x)", "exec(x)", "torch.load(p)", "torch.load(p, weights_only=False)", "np.load(p)"),
        *("np.load(p, allow_pickle=True)", "subprocess.run(c, shell=True)", "os.system(c)", "yaml.load(t)"),
        *("archive.extractall(to)", "archive.extract(member)", "import pickle", "from pickle import loads"),
        *("pickle.loads(x)", "import torch, dill", "import yaml.loader", "load(p, weights_only=False)"),
    ],
)
def test_the_check_sees(text):
    assert complaints(text, "somewhere.py")


@pytest.mark.parametrize(
    "text", ["np.load(p, allow_pickle=False)", "module.eval()", "subprocess.run(c)", "re.compile(t)"]
)
def test_the_check_lets_through(text):
    assert not complaints(text, "somewhere.py")
