//! The client's connection to a server that answers before it has read the whole request.
//!
//! A server that refuses a request by its head closes the connection. A write of the rest then
//! fails, and hyper would report that error in place of the answer.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection that discards written bytes once the server reads no more. Its reader still gets
/// the answer, or the end of the connection.
pub(super) struct EarlyAnswer<S> {
    stream: S,
    discards: bool,
}

impl<S> EarlyAnswer<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            discards: false,
        }
    }

    /// The result of a write; all of `len` bytes count as written if the server reads no more.
    fn written<T>(&mut self, result: io::Result<T>, len: T) -> io::Result<T> {
        match result {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
                ) =>
            {
                self.discards = true;
                Ok(len)
            }
            result => result,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for EarlyAnswer<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for EarlyAnswer<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.discards {
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        Poll::Ready(self.written(written, bytes.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let len = slices.iter().map(|slice| slice.len()).sum();
        if self.discards {
            return Poll::Ready(Ok(len));
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices));
        Poll::Ready(self.written(written, len))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.discards {
            return Poll::Ready(Ok(()));
        }
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(context));
        Poll::Ready(self.written(flushed, ()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use axum::body::Bytes;
    use axum::http::{Request, StatusCode};

    use crate::http::client::{Client, ClientError};

    /// A server that reads one buffer of a large request, writes `answer` and closes.
    async fn ask(name: &str, answer: &'static [u8]) -> Result<StatusCode, ClientError> {
        let name = format!("bellhop-early-{name}-{}.socket", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(answer).unwrap();
        });
        let request = Request::put("/v1/vm").body(Bytes::from(vec![b'x'; 4 << 20]));
        let answer = Client::new(&path).send(request.unwrap(), &[]).await;
        server.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        answer.map(|answer| answer.status())
    }

    #[tokio::test]
    async fn an_answer_before_the_end_of_the_request_arrives() {
        let answer = b"HTTP/1.1 413 \r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        let status = ask("answer", answer).await.unwrap();
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test]
    async fn a_server_that_only_closes_did_not_answer() {
        let error = ask("close", b"").await.unwrap_err();
        assert!(matches!(error, ClientError::Http { .. }), "{error:?}");
    }
}
