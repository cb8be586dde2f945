# Images with TensorFlow, tfdml and its compiled codecs, for Linux machines with or without GPUs:
#
#     docker build -t tfdml .
#     docker build -t tfdml-gpu --build-arg EXTRAS=gpu .
#     docker build -t tfdml-horovod --build-arg EXTRAS=cpu,horovod .
#
# BASE is an image with Python 3.11 to 3.13, its module venv, and Debian's or Ubuntu's apt-get.
# CUDA comes with the extra `gpu`; the driver is the host's, by NVIDIA's container toolkit.

ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
# The compiler that comes with the base is the one that its libraries are of.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make
RUN python3 -m venv /opt/tfdml
ENV PATH="/opt/tfdml/bin:$PATH"
WORKDIR /source
COPY . .
ARG EXTRAS=cpu
# setup.py has the ranges of versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[$EXTRAS]"
# Outside of /source, whose tfdml is not the installed one.
WORKDIR /
RUN case ",$EXTRAS," in \
        *,horovod,*) tfdml build-horovod ;; \
        *) tfdml build-codecs ;; \
    esac

FROM ${BASE}
COPY --from=build /opt/tfdml /opt/tfdml
ENV PATH="/opt/tfdml/bin:$PATH" \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
CMD ["tfdml", "test"]
