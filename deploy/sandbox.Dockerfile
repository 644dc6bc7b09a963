# What a sandbox is made of when a task names no image: make sandbox-image
FROM debian:12-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bash ca-certificates diffutils git gzip mawk patch procps python-is-python3 python3 python3-pytest \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home --shell /bin/bash agent \
    && git config --system safe.directory '*' \
    && git config --system user.name agent \
    && git config --system user.email agent@sandbox.invalid \
    && install -d -o agent -g agent /workspace

ENV LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /workspace
CMD ["/bin/bash"]
