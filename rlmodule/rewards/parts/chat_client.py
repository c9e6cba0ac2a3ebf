"""Asks a server that speaks OpenAI's chat completions, with the standard library alone.

Retries, time limits, replies of bounded size; no redirects, which would take the key elsewhere. Proxies of the
environment are used. Leaves out what is asked and how a reply is read.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from rlmodule.core.api_keys import authorization, key_in, without_key

T = TypeVar("T")

BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # worth another attempt
REPLY_BYTES = 4 << 20  # of one reply
LONGEST_WAIT = 60.0  # seconds before another attempt
WORDS_OF_SERVER = 300  # characters of an error message


class ChatError(Exception):
    """No reply, or none that can be read, after all attempts."""

    def __init__(self, text: str, *, timed_out: bool = False, wait: float | None = None) -> None:
        super().__init__(text)
        self.timed_out, self.wait = timed_out, wait


class _FinalError(ChatError):
    """One that another attempt would not change."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Redirects are errors: urllib would send the key along, and turn the question into a GET."""


@dataclass(frozen=True)
class ChatClient:
    """Args:
    url: of the server, with the version.
    settings: model, temperature and the like, as the server reads them.
    api_key_env: environment variable with the key, or empty.
    timeout: seconds for one request.
    retries: attempts after the first.
    retry_seconds: before the second attempt; doubled for each next one, unless the server says when to come back.
    """

    url: str
    settings: Mapping[str, Any]
    api_key_env: str = ""
    timeout: float = 120.0
    retries: int = 3
    retry_seconds: float = 1.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def ask(self, question: str, read: Callable[[str], T | None]) -> T:
        """What ``read`` makes of the reply; another reply is asked for where it is None.

        Raises:
            ChatError: no attempt gave one.
        """
        problem = ChatError("it was never asked")
        for attempt in range(self.retries + 1):
            if attempt:
                wait = self.retry_seconds * 2 ** (attempt - 1) if problem.wait is None else problem.wait
                self.sleep(min(wait, LONGEST_WAIT))
            try:
                reply = self.reply(question)
                found = read(reply)
                if found is not None:
                    return found
                problem = ChatError(f"{self.url} replied without a score: ...{reply[-WORDS_OF_SERVER:]!r}")
            except _FinalError:
                raise
            except ChatError as error:
                problem = error
        raise problem

    def reply(self, question: str) -> str:
        """The text of one reply.

        Raises:
            ChatError: there is none.
        """
        body = json.dumps({**self.settings, "messages": [{"role": "user", "content": question}]})
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", body.encode(errors="replace"), self._headers(), method="POST"
        )
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout) as answer:
                document = json.loads(_read(answer, self.timeout))
            content = document["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (TimeoutError, urllib.error.URLError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            late = isinstance(reason, TimeoutError)
            text = f"no reply within {self.timeout:g} seconds" if late else f"no connection ({reason})"
            raise ChatError(f"{self.url}: {text}", timed_out=late) from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self.url}: the connection broke ({type(error).__name__}: {error})") from None
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ChatError(f"{self.url} replied in another form than chat completions ({error!r:.200})") from None
        if not isinstance(content, str):
            raise ChatError(f"{self.url} replied with no text")
        return content

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | authorization(key_in(self.api_key_env))

    def _refused(self, error: urllib.error.HTTPError) -> ChatError:
        with error:
            said = error.read(4 * WORDS_OF_SERVER).decode(errors="replace")
        said = without_key(said, key_in(self.api_key_env))[:WORDS_OF_SERVER]
        kind = ChatError if error.code in BUSY else _FinalError
        return kind(f"{self.url} refused with {error.code}: {said}", wait=_seconds(error.headers.get("Retry-After")))


def _read(answer: IO[bytes], timeout: float) -> bytes:
    """The whole reply, also from a server that sends it a byte at a time, within the time and size it may have."""
    deadline, parts, size = time.monotonic() + timeout, [], 0
    while block := answer.read1(1 << 16):  # type: ignore[attr-defined]
        parts.append(block)
        size += len(block)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > REPLY_BYTES:
            raise ValueError(f"more than {REPLY_BYTES} bytes")
    return b"".join(parts)


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text or ""))
    except ValueError:
        return None
