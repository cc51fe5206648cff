"""TEMPORARY stand-in."""
import importlib.util, tempfile, sys, hashlib
from pathlib import Path

def load(name, source):
    """stub"""
    p = Path(tempfile.gettempdir()) / "tova-gen" / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    p.parent.mkdir(exist_ok=True)
    p.write_text(source)
    spec = importlib.util.spec_from_file_location(p.stem, p)
    module = importlib.util.module_from_spec(spec)
    sys.modules[p.stem] = module
    spec.loader.exec_module(module)
    return module
