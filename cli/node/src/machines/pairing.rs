//! Migration between two nodes: the work of the daemon on each side.
//!
//! ```text
//!   source       requests a receiver at the other node ─> marks the VM, asks it to leave
//!                  └─ refused: notifies the other node
//!   destination  NICs, a receiving process ─> polled whether the guest is here
//!                  └─ cancelled, or timed out ─> all is rolled back; a former VM of its
//!                     name that left before is restored as it was
//! ```
//! The steps of leaving VMs do the rest at the source. Owns these requests.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::StatusCode;
use bellhop_api::config::VmConfig;
use bellhop_api::machine::{
    EndReason, MigrationObstacle, MigrationRequest, MigrationTrial, SendConfig,
};
use bellhop_api::node::{Awaited, SendToNode};
use serde_json::Value;

use super::condition::Condition;
use super::error::{arriving, has_come, no_vm, unfinished};
use super::incoming::{IncomingMigration, IncomingReport};
use super::operations::{Requested, Sent};
use super::record::{Phase, Record};
use super::spec::{Desired, ReceiveFromNode, VmName, VmSpec};
use super::steps::{Host as _, ProxiedResponse, SendRequest};
use super::vm_entry::VmEntry;
use super::vmm::malformed;
use super::{Change, Machines};
use crate::error::{Error, ErrorKind, UNUSABLE};
use crate::peers::{Peer, check};

/// Rewrites an answer of the process there, which is gone, as one of this node.
fn about(peer: &Peer, answered: ProxiedResponse) -> ProxiedResponse {
    match serde_json::from_slice::<Value>(&answered.body) {
        Ok(Value::Object(mut answer)) if answered.status == StatusCode::OK => {
            answer.insert("destination".to_owned(), peer.to_string().into());
            ProxiedResponse {
                body: Bytes::from(Value::Object(answer).to_string()),
                ..answered
            }
        }
        _ => answered,
    }
}

impl Machines {
    /// Sends a running VM to another node, or only checks whether it could go. The answer is the
    /// VM's; a refusal of the other node has the same form.
    ///
    /// # Errors
    /// Then nothing is left at the other node.
    pub(crate) async fn send_to_node(
        self: &Arc<Self>,
        vm: &VmName,
        wanted: SendToNode,
        by: Requested,
    ) -> Result<Sent, Error> {
        self.request(self.find(vm)?, move |machines, entry| {
            let request_id = by.request_id.clone();
            let send = || machines.send_to_node_now(entry, &wanted, request_id);
            machines.send_as_operation(entry, by, send)
        })
        .await
    }

    /// Creates all of a VM but its guest, and a process that waits for the guest. `near`: the
    /// sender is on this host.
    ///
    /// # Errors
    /// The arrival failed and was rolled back.
    pub(crate) async fn receive(
        self: &Arc<Self>,
        vm: &VmName,
        wanted: ReceiveFromNode,
        near: bool,
    ) -> Result<Awaited, Error> {
        let ReceiveFromNode {
            vm: body,
            running,
            certificate,
        } = wanted;
        let (spec, _) = body.for_vm(vm, Condition::None)?;
        spec.check(vm)?;
        if let Some(running) = &running {
            spec.with_machine(running).check(vm)?;
        }
        let entry = self.place(vm);
        // Reported without the lock: the sender may hold it, here or, crosswise, at the other node.
        if let Some(record) = entry.record().filter(|record| !is_done_with(record)) {
            return Err(taken(vm, &record));
        }
        // To its end even if the client disconnects: the waiting process must be watched.
        let machines = self.clone();
        let received = tokio::spawn(async move {
            let work = move |machines: &Self, entry: &VmEntry| {
                machines.receive_now(entry, spec, running, (near, certificate))
            };
            machines.request(entry, work).await
        });
        received.await.map_err(unfinished)?
    }

    /// Cancels the migration of an incoming VM, and rolls back all that was created for it. Returns
    /// nothing if no migration is expected.
    ///
    /// # Errors
    /// It has arrived, or may have; or a step cannot be undone.
    pub(crate) async fn cancel_incoming(
        self: &Arc<Self>,
        vm: &VmName,
    ) -> Result<Option<()>, Error> {
        let entry = self.find(vm)?;
        if entry
            .record()
            .is_none_or(|record| record.incoming.is_none())
        {
            return Ok(None);
        }
        self.request(entry, Self::cancel_incoming_now)
            .await
            .map(Some)
    }

    fn send_to_node_now(
        &self,
        entry: &VmEntry,
        wanted: &SendToNode,
        request_id: String,
    ) -> Result<ProxiedResponse, Error> {
        let vm = entry.name();
        let mut record = self.sendable(entry)?;
        check(&wanted.destination)?;
        let name = wanted
            .name
            .as_deref()
            .map(str::parse::<VmName>)
            .transpose()?;
        let peer = Peer {
            node: wanted.destination.clone(),
            name: name.as_ref().unwrap_or(vm).to_string(),
        };
        let spec = record
            .spec
            .elsewhere(wanted.from.as_deref(), &wanted.vfio, |nic| {
                self.net_config(vm, &record.nic_now(vm, nic))
            })?;
        let wanted_there = ReceiveFromNode {
            vm: spec.into(),
            running: record.running.as_deref().cloned(),
            certificate: None,
        };
        let (endpoint, pairing) = match self.peers.receive(&peer, wanted_there) {
            Ok(agreed) => agreed,
            Err(error) => {
                if matches!(error.kind(), ErrorKind::UnclearThere(_)) {
                    // The other node may have created a process for which no guest comes.
                    self.withdraw(vm, &peer);
                }
                let (reason, remedy) = match error.kind() {
                    ErrorKind::RefusedThere(reason, remedy) if wanted.dry_run => {
                        (reason.clone(), remedy.clone())
                    }
                    _ => return Err(error),
                };
                let trial = MigrationTrial {
                    destination: peer.to_string(),
                    movable: false,
                    obstacles: vec![MigrationObstacle { reason, remedy }],
                    forecast: None,
                };
                return Ok(ProxiedResponse {
                    status: StatusCode::OK,
                    body: serde_json::to_vec(&trial).map_err(malformed)?.into(),
                });
            }
        };
        let wanted_of_machine = MigrationRequest::Send(SendConfig {
            pairing: Some(pairing),
            fd: Some(0),
            ..wanted.to_endpoint(endpoint.clone(), None, false)
        });
        let body = serde_json::to_vec(&wanted_of_machine).map_err(malformed)?;
        let request = SendRequest {
            destination: peer.to_string(),
            body: body.into(),
            endpoint: Some(endpoint),
            request_id,
            peer: (!wanted.dry_run).then(|| peer.clone()),
        };
        let sent = self.lifecycle(entry).send(&mut record, &request);
        let marked = record.outgoing.as_ref();
        if marked.is_none_or(|mark| mark.peer.as_ref() != Some(&peer)) {
            // The VM stays, so the other node must not wait for it.
            self.withdraw(vm, &peer);
        }
        Ok(about(&peer, sent?))
    }

    fn receive_now(
        &self,
        entry: &VmEntry,
        mut spec: VmSpec,
        running: Option<VmConfig>,
        (near, certificate): (bool, Option<String>),
    ) -> Result<Awaited, Error> {
        let vm = entry.name();
        let _admitted = self.admit()?;
        // Its guest runs at the source.
        spec.state = Desired::Running;
        let mut former = entry.record();
        if let Some(record) = former.take_if(|record| !is_done_with(record)) {
            return Err(taken(vm, &record));
        }
        let now = running.as_ref().map(|running| spec.with_machine(running));
        let missing = spec
            .boot_files()
            .chain(now.iter().flat_map(VmSpec::boot_files))
            .find(|(_, path)| !path.is_file());
        if let Some((what, path)) = missing {
            let shown = path.display();
            let message = format!("its {what} {shown} does not exist on this host: copy it");
            return Err(Error::new(UNUSABLE, message));
        }
        let socket = self.paths.migration_socket(vm);
        let socket = near.then_some(socket.as_path());
        let reception = self.peers.place(socket, certificate)?;
        let awaited = reception.awaited();
        self.reserve(entry, &spec)?;
        if let Some(mut record) = former.take_if(|record| record.phase != Phase::Present) {
            // Parts that could not be undone have no owner.
            self.lifecycle(entry).delete(&mut record)?;
            former = entry.record();
        }
        let incoming = IncomingMigration {
            listen: awaited.listen.clone(),
        };
        let mut record = Record::expecting(spec, incoming);
        record.running = running.map(Box::new);
        *entry.reception.lock() = Some(reception);
        let received = self.lifecycle(entry).receive(record, former);
        // Left if the process has not got it.
        entry.reception.lock().take();
        received?;
        self.publish(vm, Change::Created);
        Ok(awaited)
    }

    fn cancel_incoming_now(&self, entry: &VmEntry) -> Result<(), Error> {
        let vm = entry.name();
        let Some(mut record) = entry.record().filter(|record| record.incoming.is_some()) else {
            return Err(no_vm(vm));
        };
        if record.migration_unknown().is_some() {
            // A client must report where its guest is.
            return Err(has_come(vm));
        }
        let done = self.roll_back(entry, &mut record, "its migration was cancelled");
        if let Err(error) = &done
            && matches!(error.kind(), ErrorKind::HasCome)
        {
            self.query_incoming(entry);
        }
        done
    }

    /// Cancels the wait for a VM, and deletes all that was created for it.
    fn roll_back(&self, entry: &VmEntry, record: &mut Record, why: &str) -> Result<(), Error> {
        let vm = entry.name();
        if record.phase == Phase::Present && !self.lifecycle(entry).cancel_incoming(record)? {
            return Err(has_come(vm));
        }
        self.lifecycle(entry).delete(record)?;
        self.publish(vm, Change::NotArrived(why.to_owned()));
        self.publish_deleted(entry);
        Ok(())
    }

    /// Queries whether an awaited VM is here; cancels its arrival on a timeout.
    pub(super) fn query_incoming(&self, entry: &VmEntry) {
        let Some(mut record) = entry.record().filter(|record| record.incoming.is_some()) else {
            return;
        };
        let vm = entry.name();
        match self.lifecycle(entry).query_incoming(&mut record) {
            IncomingReport::Arrived => self.publish(vm, Change::Arrived),
            incoming_report if incoming_report.has_failed() => {
                tracing::warn!(%vm, "no source has connected: cancelling the incoming migration");
                if let Err(error) = self.roll_back(entry, &mut record, "no source connected") {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(%vm, error, "cannot cancel a migration; it stays pending");
                }
            }
            IncomingReport::Waits(_)
            | IncomingReport::UnderWay
            | IncomingReport::Stayed
            | IncomingReport::Indeterminate
            | IncomingReport::Silent => {}
        }
    }
}

/// Why another VM cannot take the name of this one.
fn taken(vm: &VmName, record: &Record) -> Error {
    if record.incoming.is_some() {
        arriving(vm)
    } else {
        let message = format!(
            "this node already has a virtual machine {vm}: give the incoming one another name \
             (--as), or delete the existing one"
        );
        Error::conflict("name_taken", message)
    }
}

/// Whether another VM may take its name: it left this node, or one of its parts could not be
/// undone.
fn is_done_with(record: &Record) -> bool {
    let left = record
        .last_end
        .as_ref()
        .is_some_and(|end| end.reason == EndReason::Moved);
    record.phase != Phase::Present
        || (left && record.process().is_none() && record.outgoing.is_none())
}
