"""Build the kernels of Apex's optimizers for `fusedstep bench`, from sources that lie in a folder.

    python benchmarks/build_apex.py FOLDER
    fusedstep bench --peers-path FOLDER --peer apex

FOLDER/apex is a checkout of NVIDIA/apex, of which `apex/` and `csrc/` are enough. The extension `amp_C`, which
Apex's optimizers import, is compiled with torch's cpp_extension for the GPU of this machine, and put beside the
package. It needs nvcc (from CUDA_HOME, the PATH, /usr/local/cuda, or the package nvidia-cuda-nvcc). ninja is
taken from the PATH or from FOLDER/bin; without one the files are compiled here, as many at once as there are
processors.
"""

import argparse
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

# of the list in Apex's setup.py: all that the front end links to
SOURCES = [
    "amp_C_frontend.cpp",
    "multi_tensor_sgd_kernel.cu",
    "multi_tensor_scale_kernel.cu",
    "multi_tensor_axpby_kernel.cu",
    "multi_tensor_l2norm_kernel.cu",
    "multi_tensor_l2norm_kernel_mp.cu",
    "multi_tensor_l2norm_scale_kernel.cu",
    "multi_tensor_lamb_stage_1.cu",
    "multi_tensor_lamb_stage_2.cu",
    "multi_tensor_adam.cu",
    "multi_tensor_adagrad.cu",
    "multi_tensor_novograd.cu",
    "multi_tensor_lamb.cu",
    "multi_tensor_lamb_mp.cu",
    "update_scale_hysteresis.cu",
]
CXX = ["-O3"]
# as Apex builds them
NVCC = ["-O3", "-lineinfo", "--use_fast_math"]


def packages() -> list[Path]:
    """Folders of NVIDIA's packages, which hold a toolkit's parts when pip has installed them."""
    places = [*site.getsitepackages(), sysconfig.get_paths()["purelib"], str(Path(torch.__file__).parents[1])]
    return [p for place in dict.fromkeys(places) for p in sorted(Path(place).glob("nvidia/*")) if p.is_dir()]


def toolkit() -> Path:
    """The folder with bin/nvcc; torch is told where, before it looks itself."""
    on_path = shutil.which("nvcc")
    places = [
        *(Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ),
        *([Path(on_path).resolve().parents[1]] if on_path else []),
        Path("/usr/local/cuda"),
        *sorted(Path("/usr/local").glob("cuda-*"), reverse=True),
        *packages(),
    ]
    for place in places:
        if (place / "bin" / "nvcc").exists():
            os.environ["CUDA_HOME"] = str(place)
            return place
    looked = ", ".join(dict.fromkeys(map(str, places)))
    raise SystemExit(f"found no nvcc; looked in {looked}; set CUDA_HOME to a toolkit's folder")


def includes() -> list[str]:
    """Headers of libraries that a toolkit without them lacks, and that torch's own headers include."""
    return [str(p / "include") for p in packages() if (p / "include").is_dir()]


def runtime(cuda: Path, build: Path) -> str:
    """The folder to link the CUDA runtime from: packages have it by a name with a version only."""
    folders = [cuda / "lib64", cuda / "lib", *(package / "lib" for package in packages())]
    for folder in folders:
        if (folder / "libcudart.so").exists():
            return str(folder)
    found = [library for folder in folders for library in sorted(folder.glob("libcudart.so.*"))]
    link = build / "libcudart.so"
    if found and not link.exists():
        link.symlink_to(found[0])
    return str(build)


def with_ninja(sources: list[str], cuda: Path, build: Path) -> None:
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(cuda)
    cpp_extension.load(
        name="amp_C",
        sources=sources,
        extra_cflags=CXX,
        extra_cuda_cflags=NVCC,
        extra_ldflags=[f"-L{runtime(cuda, build)}"],
        extra_include_paths=includes(),
        build_directory=str(build),
        with_cuda=True,
        verbose=True,
    )


def by_hand(sources: list[str], cuda: Path, build: Path) -> None:
    """What ninja would have done: every file by itself, then one library."""
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(cuda)
    include = [*cpp_extension.include_paths("cuda"), sysconfig.get_paths()["include"], *includes()]
    common = [f"-I{path}" for path in include]
    # the version of C++ that torch's headers need
    standard = 20 if "std=c++20" in Path(cpp_extension.__file__).read_text() else 17
    common += ["-DTORCH_EXTENSION_NAME=amp_C", "-DTORCH_API_INCLUDE_EXTENSION_H", f"-std=c++{standard}"]
    major, minor = torch.cuda.get_device_capability()
    arch = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
    for_gpu = [arch, *cpp_extension.COMMON_NVCC_FLAGS, "-Xcompiler", "-fPIC"]

    def compiled(source: str) -> str:
        target = str(build / f"{Path(source).name}.o")
        if source.endswith(".cu"):
            command = [str(cuda / "bin" / "nvcc"), "-c", source, "-o", target, *common, *for_gpu, *NVCC]
        else:
            command = [os.environ.get("CXX", "c++"), "-c", source, "-o", target, *common, "-fPIC", *CXX]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(compiled, sources)]
    libraries = [f"-L{path}" for path in (runtime(cuda, build), *cpp_extension.library_paths("cuda"))]
    names = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", "-ltorch", "-ltorch_python", "-lcudart"]
    command = [os.environ.get("CXX", "c++"), "-shared", *objects, "-o", str(build / "amp_C.so"), *libraries]
    subprocess.run([*command, *names], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the kernels of Apex's optimizers.")
    parser.add_argument("folder", type=Path, help="where apex/ lies, a checkout of NVIDIA/apex")
    folder = parser.parse_args().folder.resolve()
    apex = folder / "apex"
    sources = [str(apex / "csrc" / name) for name in SOURCES]
    missing = [source for source in sources if not Path(source).exists()]
    if missing:
        raise SystemExit(f"found no {missing[0]}; put a checkout of NVIDIA/apex into {apex}")
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; build on the machine that will run the benchmark")
    cuda = toolkit()
    print(f"nvcc: {cuda}")
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count()))
    # what was installed beside this Python, then what was brought along
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), str(folder / "bin")]
    os.environ["PATH"] = os.pathsep.join(places)
    build = apex / "build"
    build.mkdir(exist_ok=True)
    (with_ninja if shutil.which("ninja") else by_hand)(sources, cuda, build)
    shutil.copy(build / "amp_C.so", apex / "amp_C.so")
    # a step in a process of its own, which imports it as a benchmark does
    check = "import torch, apex.optimizers as o; p = torch.nn.Parameter(torch.ones(3).cuda()); p.grad = p + 0; "
    check += "opt = o.FusedAdam([p], lr=0.5); opt.step(); print('apex steps:', p.tolist())"
    paths = os.pathsep.join(filter(None, (str(apex), os.environ.get("PYTHONPATH"))))
    subprocess.run([sys.executable, "-c", check], check=True, env={**os.environ, "PYTHONPATH": paths})


if __name__ == "__main__":
    main()
