# CPU:  docker build -t saccade .
# CUDA: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu132 -t saccade:cuda .
#       (the wheels contain CUDA; the host needs a driver and the NVIDIA container toolkit: docker run --gpus all ...)
#
# Serve: docker run -p 7860:7860 -v saccade:/cache saccade
# Batch: docker run -v saccade:/cache -v $PWD/images:/images:ro -v $PWD/out:/out saccade \
#            predict svit_nano /images --task embed --out /out
FROM python:3.11-slim

# Triton compiles its launchers with gcc on the first call of a GPU kernel.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/saccade
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY recipes recipes
COPY saccade saccade
RUN pip install --no-cache-dir -c constraints.txt --index-url ${TORCH_INDEX} torch torchvision \
    && pip install --no-cache-dir -c constraints.txt '.[train,web,export,scale]'

# Downloaded weights and compiled kernels, in one folder that a volume can keep.
ENV SACCADE_HOME=/cache/saccade \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor
RUN useradd --create-home --uid 1000 saccade && mkdir -p /cache /out && chown saccade /cache /out
USER saccade
WORKDIR /home/saccade
VOLUME /cache
EXPOSE 7860

ENTRYPOINT ["saccade"]
CMD ["serve", "--host", "0.0.0.0", "--port", "7860"]
