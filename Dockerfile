# Images with Strop and its optional packages:
#
#   docker build --target cpu  -t strop:cpu  .
#   docker build --target cuda -t strop:cuda .     # the driver comes from the host (NVIDIA Container Toolkit)
#   docker run --rm -it -v "$PWD:/work" strop:cpu strop quickstart
#   docker run --rm -it -v "$PWD:/work" --gpus all --shm-size 16g strop:cuda strop ppo ...
#
# There is no entry point, so that KubeRay and SLURM can start their own commands.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# wget: probes of KubeRay. git: packages of your own from repositories. Debian keeps only its newest versions, so no pins.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends git wget && rm -rf /var/lib/apt/lists/*
# Kubernetes can check that a user is not root only by a number.
RUN useradd --create-home --uid 1000 strop && mkdir /work && chown strop /work
WORKDIR /opt/strop
COPY constraints.txt ./
COPY scripts/torch_build.py scripts/

# torch comes first: a change of Strop does not download it again.
FROM base AS cpu
# The arguments for pip are several words.
# hadolint ignore=SC2046
RUN pip install -c constraints.txt $(python scripts/torch_build.py --index https://download.pytorch.org/whl/cpu) torch
COPY pyproject.toml README.md LICENSE ./
COPY examples examples
COPY strop strop
RUN pip install -c constraints.txt '.[math,lora,gguf,tensorboard,serve,mcp,ray,plot]'
USER 1000
WORKDIR /work
CMD ["strop", "help"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles kernels at run time and needs a C compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# hadolint ignore=SC2046
RUN pip install -c constraints.txt $(python scripts/torch_build.py --index default) torch
COPY pyproject.toml README.md LICENSE ./
COPY examples examples
COPY strop strop
RUN pip install -c constraints.txt '.[math,lora,gguf,tensorboard,serve,mcp,ray,plot,liger]'
USER 1000
WORKDIR /work
CMD ["strop", "help"]
