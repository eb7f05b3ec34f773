# Images for machines without a GPU; Dockerfile.cuda is the worker for NVIDIA GPUs. From the root of a checkout:
#
#   docker build --target scheduler --tag outrider-scheduler:0.1.0 .     # scheduler and gateway, without torch
#   docker build --target worker    --tag outrider-worker:0.1.0 .        # target and draft workers
#   docker build --target ray       --tag outrider-ray:0.1.0 .           # all roles and Ray, for the component kuberay
#
# They run as user 10001, need no writable file but what is mounted at /tmp and (workers) /models, and take their
# settings from OUTRIDER_* and from the file that OUTRIDER_CONFIG names. Build arguments:
#
#   PYTHON_IMAGE      base; name it with the digest that your registry shows, to pin it to the byte
#   PIP_INDEX_URL     package index; none: pip's own
#   TORCH_INDEX_URL   one more index, with CPU builds of torch; "": none, where the package index has them itself
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS environment
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/outrider \
 && /opt/outrider/bin/python -m pip install --upgrade pip setuptools

FROM environment AS wheel
COPY . ./
RUN /opt/outrider/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM environment AS scheduler-environment
COPY --from=wheel /wheels /wheels
RUN /opt/outrider/bin/python -m pip install --find-links /wheels 'outrider[scheduler]' \
 && /opt/outrider/bin/python -m pip uninstall --yes setuptools pip

# torch is a layer of its own, which stays when only our code changes.
FROM environment AS torch
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL" /opt/outrider/bin/python -m pip install torch

FROM torch AS worker-environment
COPY --from=wheel /wheels /wheels
RUN /opt/outrider/bin/python -m pip install --find-links /wheels 'outrider[worker]'

FROM torch AS ray-environment
COPY --from=wheel /wheels /wheels
RUN /opt/outrider/bin/python -m pip install --find-links /wheels 'outrider[scheduler,worker,ray]' 'ray[default]'

FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 outrider \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin outrider
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /
USER 10001:10001
ENTRYPOINT ["outrider"]

FROM runtime AS scheduler
COPY --from=scheduler-environment /opt/outrider /opt/outrider
EXPOSE 50051 8000 50060
CMD ["scheduler"]

FROM runtime AS worker
COPY --from=worker-environment /opt/outrider /opt/outrider
ENV OUTRIDER_HOME=/models
EXPOSE 50061 50062 50060
CMD ["target"]

FROM runtime AS ray
COPY --from=ray-environment /opt/outrider /opt/outrider
ENV OUTRIDER_HOME=/models RAY_USAGE_STATS_ENABLED=0
CMD ["up"]
