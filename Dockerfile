# syntax=docker/dockerfile:1
# The image of all pods of the helm chart. It was written without a container engine and has never been built: see
# docs/operations.md, "What was never tried".
#
#   docker build --target cpu -t llm42:0.1.0 .          with SmolLM2, for the CPU demonstration
#   docker build --target gpu -t llm42:0.1.0-gpu .      with vLLM; the model comes from a volume
#
# BASE: a tag moves. For images that are equal next year, too, give the digest:
#     docker buildx imagetools inspect python:3.11-slim-bookworm        prints it in the line "Digest:"
#     docker build --build-arg BASE=python:3.11-slim-bookworm@sha256:...
# and write it here. constraints-gpu.txt is for Python 3.11.
#
# PIP_ARGS reaches every pip call, for instance an index of your own. TORCH_PIP_ARGS reaches the call that installs torch for
# CPUs: pip's own index has CUDA builds, which run on CPUs too but are several GB. The index of CPU builds is PyTorch's; its
# page "Get started" shows the address (Linux, Pip, Python, CPU). Give it beside pip's own, which has what torch imports;
# pip prefers 2.13.0+cpu to 2.13.0:
#     docker build --target cpu --build-arg TORCH_PIP_ARGS="--extra-index-url ADDRESS" -t llm42:0.1.0 .
# It cannot be the default: this project names no hosts, and pip knows indexes by their address only.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/llm42/venv
ENV PATH=/opt/llm42/venv/bin:$PATH
WORKDIR /src

FROM build AS build-cpu
ARG TORCH_PIP_ARGS=""
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install ${PIP_ARGS} ${TORCH_PIP_ARGS} -c constraints.txt 'torch==2.13.0' \
    && python -c "import torch; print('WARNING: torch with CUDA, see TORCH_PIP_ARGS' if torch.version.cuda else 'torch for CPUs')"
COPY llm42 llm42
COPY kernels kernels
COPY deployments deployments
RUN pip install ${PIP_ARGS} -c constraints.txt . \
    && cd / && python -m llm42.checkpoint.fetch /opt/llm42/models/smollm2

# vLLM brings the torch that it was built for, and asks for other versions than the CPU image: constraints of its own.
FROM build AS build-gpu
COPY constraints-gpu.txt pyproject.toml README.md LICENSE ./
RUN pip install ${PIP_ARGS} -c constraints-gpu.txt vllm 'ray[serve]'
COPY llm42 llm42
COPY kernels kernels
COPY deployments deployments
RUN pip install ${PIP_ARGS} -c constraints-gpu.txt . \
    && pip check

FROM ${BASE} AS runtime
# wget: probes of KubeRay operators before 1.7 (newer ones ask by HTTP). bash is there: KubeRay starts Ray with it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 llm42 \
    && useradd --uid 1000 --gid 1000 --create-home --home-dir /home/llm42 llm42 \
    && mkdir -p /var/cache/llm42 /models \
    && chown 1000:1000 /var/cache/llm42
# A login shell (KubeRay with ENABLE_LOGIN_SHELL) sets PATH anew and finds `ray` by the profile. `ray` and `serve` are found
# without any PATH, too. Not so python: by a link from elsewhere it would be the system's, without our packages.
RUN echo 'PATH=/opt/llm42/venv/bin:$PATH' > /etc/profile.d/llm42.sh \
    && ln -s /opt/llm42/venv/bin/ray /opt/llm42/venv/bin/serve /usr/local/bin/
ENV PATH=/opt/llm42/venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/llm42
WORKDIR /home/llm42
# A number, so that Kubernetes can tell that it is not root.
USER 1000:1000

FROM runtime AS gpu
USER root
# Triton and torch.compile build small C programs at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# vLLM's FlashInfer sampler is compiled at start with nvcc, which is not here.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility VLLM_USE_FLASHINFER_SAMPLER=0
COPY --from=build-gpu /opt/llm42 /opt/llm42
USER 1000:1000

FROM runtime AS cpu
COPY --from=build-cpu /opt/llm42 /opt/llm42
