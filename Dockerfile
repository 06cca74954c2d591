# Builds Gossamer and runs its demo:
#
#     docker build --tag gossamer .
#     docker run --rm gossamer
#     docker run --rm gossamer .venv/bin/python -m gossamer
FROM python:3.12-slim

# Torch's CPU build; a bare `torch` brings gigabytes of CUDA packages.
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /gossamer
COPY . .
RUN python -m venv .venv \
 && .venv/bin/pip install --no-cache-dir ${TORCH} \
 && .venv/bin/pip install --no-cache-dir --editable '.[examples]'

CMD [".venv/bin/python", "examples/pruned_transformer.py"]
