# pgworker with the example app of examples/tour; your own image installs pgworker beside your app in the same way.
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1

COPY pyproject.toml README.md LICENSE /build/
COPY pgworker /build/pgworker
COPY migrations /build/migrations
RUN pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore /build && rm -r /build

WORKDIR /app
COPY examples examples

# A number needs no entry in /etc/passwd, and Kubernetes can tell that it is not root.
USER 10001:10001
CMD ["python", "-m", "pgworker"]
