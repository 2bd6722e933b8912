# syntax=docker/dockerfile:1
# The image of all pods of the helm chart. It was written without a container engine and has never been built: see
# docs/operations.md, "What was never tried".
#
#   docker build --target cpu -t llm42:0.1.0 .          with SmolLM2, for the CPU demonstration
#   docker build --target gpu -t llm42:0.1.0-gpu .      with vLLM; the model comes from a volume
#
# PIP_ARGS reaches every pip call, for instance an index of CPU wheels of torch: without one, pip takes the CUDA build, which
# runs on CPUs too but is larger.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/llm42/venv
ENV PATH=/opt/llm42/venv/bin:$PATH
WORKDIR /src

FROM build AS build-cpu
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install ${PIP_ARGS} -c constraints.txt 'torch==2.13.0'
COPY llm42 llm42
COPY kernels kernels
COPY deployments deployments
RUN pip install ${PIP_ARGS} -c constraints.txt . \
    && cd / && python -m llm42.checkpoint.fetch /opt/llm42/models/smollm2

# vLLM brings the torch that it was built for, so constraints.txt, which pins another, holds for the rest only.
FROM build AS build-gpu
ARG VLLM=0.26.0
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install ${PIP_ARGS} "vllm==${VLLM}"
COPY llm42 llm42
COPY kernels kernels
COPY deployments deployments
RUN ray=$(grep '^ray==' constraints.txt | cut -d= -f3) \
    && pip install ${PIP_ARGS} "ray[serve]==${ray}" . \
    && pip check

FROM python:${PYTHON}-slim-bookworm AS runtime
# wget: KubeRay's probes. bash is there: KubeRay starts Ray with it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 llm42 \
    && useradd --uid 1000 --gid 1000 --create-home --home-dir /home/llm42 llm42 \
    && mkdir -p /var/cache/llm42 /models \
    && chown 1000:1000 /var/cache/llm42
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
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/llm42 /opt/llm42
USER 1000:1000

FROM runtime AS cpu
COPY --from=build-cpu /opt/llm42 /opt/llm42
