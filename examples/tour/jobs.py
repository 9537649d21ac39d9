"""The app of the tour and of docker-compose.yml: one kind that runs job by job, one that runs in batches."""

from dataclasses import dataclass

from pgworker import App, Job

app = App()


@dataclass(frozen=True)
class NewUser:
    """Whom to welcome."""

    name: str
    email: str


@dataclass(frozen=True)
class Doc:
    """A text to be embedded."""

    text: str


@app.kind("welcome_mail", max_attempts=5)
async def welcome_mail(job: Job[NewUser]) -> None:
    """Stand in for a mail server."""
    print(f"to {job.payload.email}: welcome, {job.payload.name}")


@app.kind("embed", batch=64, window=0.25)
async def embed(jobs: list[Job[Doc]]) -> list[list[float]]:
    """Stand in for a model: three numbers per text, one list per job, in order."""
    texts = [job.payload.text for job in jobs]
    return [[float(len(text)), float(text.count(" ")), float(text.count("e"))] for text in texts]
