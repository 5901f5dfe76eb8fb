# pacorl in a container. For a CPU, or with BUILD=cuda for an NVIDIA GPU (PyPI's torch brings CUDA's libraries; the host
# needs its driver and the container toolkit):
#
#   docker build -t pacorl:cpu .
#   mkdir -p runs
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" pacorl:cpu quickstart
#   docker build -t pacorl:cuda --build-arg BUILD=cuda .
#   mkdir -p ~/.cache/huggingface
#   docker run --rm --user "$(id -u):$(id -g)" --gpus all -p 127.0.0.1:8000:8000 -v ~/.cache/huggingface:/work/.cache/huggingface pacorl:cuda serve X-GenGroup/PaCo-Reward-7B --host 0.0.0.0
#
# A tag can be moved to another image, a digest cannot: to pin the base, look its digest up and name it:
#
#   docker buildx imagetools inspect python:3.12-slim
#   docker build --build-arg BASE=python:3.12-slim@sha256:DIGEST .
ARG BUILD=cpu
ARG PYTHON=3.12
ARG BASE=python:${PYTHON}-slim

# Packages are installed from wheels only, which run no code while they are installed. The project's own build runs
# code, so it has no network.
FROM ${BASE} AS wheel
WORKDIR /source
COPY constraints.txt .
RUN pip install --no-cache-dir --only-binary=:all: -c constraints.txt hatchling
COPY . .
RUN --network=none python -m hatchling build -t wheel -d /dist

FROM ${BASE} AS torch-cpu
COPY constraints.txt /
RUN pip install --no-cache-dir --only-binary=:all: --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' /constraints.txt)"

FROM ${BASE} AS torch-cuda
COPY constraints.txt /
RUN pip install --no-cache-dir --only-binary=:all: -c /constraints.txt torch

FROM torch-${BUILD}
COPY --from=wheel /dist/*.whl /tmp/
# The torch of the stage before stays: its local version (+cpu) would not fit the pin.
RUN grep -v '^torch==' /constraints.txt > /tmp/constraints.txt \
    && wheel=$(echo /tmp/*.whl) \
    && pip install --no-cache-dir --only-binary=:all: -c /tmp/constraints.txt "$wheel[serve,studio,data]" \
    && rm /tmp/*.whl /tmp/constraints.txt && useradd --create-home --home-dir /work pacorl
# A new named volume has the owner and mode of the folder under it, and a missing folder would be root's. Every user may
# write here, since `docker run --user` names one that the image does not know; USER stands in for its missing name.
RUN mkdir -p /work/.cache/huggingface /work/runs \
    && chown -R pacorl:pacorl /work/.cache /work/runs \
    && chmod 1777 /work /work/.cache /work/.cache/huggingface /work/runs
ENV HOME=/work USER=pacorl
USER pacorl
WORKDIR /work
EXPOSE 8000 8765 8767
ENTRYPOINT ["pacorl"]
CMD ["--help"]
