//! Sends the cases of a description to a server, one after the other, and compares its resources
//! before and after.

use lab::api::Client;
use lab::endurance::soak;
use lab::notice::{Kind, notice};
use lab::openapi::Description;
use lab::openapi::cases::{Case, cases, sample};
use lab::openapi::exchange::{Answer, Request, ask};
use lab::openapi::judge::wrong;
use lab::openapi::known::Known;
use lab::openapi::random::Random;
use lab::vmm_process::descriptors;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How many bytes of a request or an answer are shown.
const SHOWN: usize = 400;
/// More complaints of one run add no information.
const COMPLAINTS_MAX: usize = 40;
/// Of the cases with the same odd part of the same operation, the gate takes one in this many.
const ODD_EACH: usize = 10;
/// How long the server may take to close the connections that clients have left.
const CLOSED: Duration = Duration::from_secs(30);

/// One run over all cases.
pub(crate) struct Trial<'a> {
    client: &'a Client,
    pid: u32,
    description: Description,
    cases: Vec<Case>,
}

impl<'a> Trial<'a> {
    /// Reads the server's own description. `pid` is its process.
    pub(crate) fn new(client: &'a Client, pid: u32, known: &Known, seed: u64) -> Self {
        let description = Description::new(client.get("/v1/openapi.json").unwrap()).unwrap();
        let mut random = Random::announced(seed);
        let mut cases = cases(&description, known, &mut random);
        // The leftovers of one request must meet others.
        random.shuffle(&mut cases);
        if !soak() {
            let all = cases.len();
            cases = sample(cases, ODD_EACH);
            notice(
                Kind::Thinned,
                format!(
                    "requests from a description: {} of {all}, one in {ODD_EACH} of the odd ones",
                    cases.len()
                ),
            );
        }
        Self {
            client,
            pid,
            description,
            cases,
        }
    }

    /// Sends the cases that `is_meant` selects, and calls `afterwards` for each successful request.
    #[track_caller]
    pub(crate) fn run(
        &self,
        is_meant: impl Fn(&Request) -> bool,
        mut afterwards: impl FnMut(&Request),
    ) {
        let before = settled(self.pid, None);
        let start = Instant::now();
        let mut complaints = Vec::new();
        let mut statuses = BTreeMap::<u16, u32>::new();
        let mut count = 0;
        for case in self.cases.iter().filter(|case| is_meant(&case.request)) {
            count += 1;
            let answer = ask(self.client.socket(), &case.request).unwrap();
            let found = wrong(&self.description, case, answer.as_ref());
            if !found.is_empty() {
                complaints.push(complaint(case, answer.as_ref(), &found));
                assert!(
                    complaints.len() < COMPLAINTS_MAX,
                    "{}",
                    complaints.join("\n")
                );
            }
            let status = answer.map_or(0, |answer| answer.status);
            *statuses.entry(status).or_default() += 1;
            if (200..300).contains(&status) {
                afterwards(&case.request);
            }
        }
        println!("{count} requests in {:?}: {statuses:?}", start.elapsed());
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
        let after = settled(self.pid, Some(before.len()));
        let [opened, closed] =
            [after.difference(&before), before.difference(&after)].map(Iterator::collect::<Vec<_>>);
        assert_eq!(
            before.len(),
            after.len(),
            "the server has opened {opened:?}, and closed {closed:?}"
        );
    }
}

/// The open descriptors of the server, once it has closed the connections that clients have left.
/// It waits for `wanted` to be reached.
fn settled(pid: u32, wanted: Option<usize>) -> BTreeSet<String> {
    let start = Instant::now();
    let mut last = descriptors(pid).unwrap().len();
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = descriptors(pid).unwrap();
        if now.len() == wanted.unwrap_or(last) || start.elapsed() > CLOSED {
            return now;
        }
        last = now.len();
    }
}

fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let start: String = text.chars().take(SHOWN).collect();
    if start.len() < text.len() {
        format!("{start:?}… ({} bytes)", bytes.len())
    } else {
        format!("{start:?}")
    }
}

fn complaint(case: &Case, answer: Option<&Answer>, found: &[String]) -> String {
    let request = &case.request;
    let body = request.body.as_deref().map_or("no body".into(), shown);
    let said = answer.map_or("no answer".into(), |answer| {
        format!("{} {}", answer.status, shown(&answer.body))
    });
    format!(
        "{} {} ({}, {:?})\n  {body}\n  {said}\n  {}",
        request.method,
        shown(&request.target),
        case.what,
        case.expect,
        found.join("; ")
    )
}
