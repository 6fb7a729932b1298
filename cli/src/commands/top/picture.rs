//! The picture of a snapshot as lines of text.
//!
//! Owns the layout and the user's selection.

use std::collections::VecDeque;

use bellhop_api::node::{Event, Vm, VmPhase};
use bellhop_common::table::Table;

use super::screen::{Key, Line, Size, Style};
use super::source::Snapshot;
use crate::commands::vm::{list, view};
use crate::commands::{events, operation};

/// The maximum number of events in the picture.
const EVENTS: usize = 10;

/// A line about a problem.
pub(super) fn alarm(text: &str) -> Line {
    Line::new(text, Style::Alarm)
}

/// Whether the user ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    No,
    Yes,
}

/// What the user has selected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct View {
    /// The VM's name; none before the first key.
    pub(super) selected: Option<String>,
    /// The VM whose details are shown.
    pub(super) open: Option<String>,
}

impl View {
    /// The user has pressed a key.
    pub(super) fn press(&mut self, key: Key, snapshot: &Snapshot) -> Done {
        match key {
            Key::Quit => return Done::Yes,
            Key::Back => self.open = None,
            Key::Enter => {
                let mut names = snapshot.vms.iter().map(|vm| &vm.name);
                let selected = self.selected.as_ref();
                self.open = names.find(|name| Some(*name) == selected).cloned();
            }
            Key::Up | Key::Down => self.select(key, &snapshot.vms),
        }
        Done::No
    }

    fn select(&mut self, key: Key, vms: &[Vm]) {
        let last = vms.len().saturating_sub(1);
        let mut all = vms.iter();
        let at = all.position(|vm| Some(&vm.name) == self.selected.as_ref());
        let next = match (at, key) {
            (None, _) => 0,
            (Some(at), Key::Up) => at.saturating_sub(1),
            (Some(at), _) => at.saturating_add(1).min(last),
        };
        self.selected = vms.get(next).map(|vm| vm.name.clone());
    }
}

/// The whole picture.
pub(super) fn lines(snapshot: &Snapshot, view: &View) -> Vec<Line> {
    let mut lines = match &view.open {
        Some(name) => details(snapshot, name),
        None => overview(snapshot, view),
    };
    push_events(&mut lines, &snapshot.events, view.open.as_deref());
    lines
}

fn overview(snapshot: &Snapshot, view: &View) -> Vec<Line> {
    let of_phase = |phase| {
        snapshot
            .vms
            .iter()
            .filter(|vm| vm.status.phase == phase)
            .count()
    };
    let running = of_phase(VmPhase::Running);
    let title = format!("VMs: {}, running: {running}", snapshot.vms.len());
    let mut lines = vec![Line::new(&title, Style::Heading)];
    if !snapshot.vms.is_empty() {
        let rows = snapshot.vms.iter().map(|vm| match &view.selected {
            Some(name) if *name == vm.name => Style::Selected,
            _ if is_healthy(vm) => Style::Plain,
            _ => Style::Alarm,
        });
        push_table(&mut lines, &list::table(&snapshot.vms).narrow(), rows);
    }
    let all = snapshot
        .vms
        .iter()
        .flat_map(|vm| vm.status.nic_devices.iter().map(move |nic| (vm, nic)));
    let mut styles = Vec::new();
    let mut rows = Vec::new();
    for (vm, nic) in all {
        let unknown = || "-".to_owned();
        let rings = snapshot.rings.get(&(vm.name.clone(), nic.id.clone()));
        let findings = view::findings(vm, &nic.id);
        let driver = rings.map(|rings| match (rings.broken, rings.driver_ok) {
            (true, _) => "BROKEN",
            (false, true) => "ok",
            (false, false) => "none",
        });
        let is_good = findings.is_empty() && driver != Some("BROKEN");
        styles.push(if is_good { Style::Plain } else { Style::Alarm });
        let device = nic.vdpa_device.clone();
        let path = || Some(nic.character_device.as_ref()?.display().to_string());
        rows.push([
            vm.name.clone(),
            nic.id.clone(),
            view::mac(vm, &nic.id).unwrap_or_else(unknown),
            device.or_else(path).unwrap_or_else(unknown),
            driver.map_or_else(unknown, str::to_owned),
            rings.map_or_else(unknown, |rings| rings.queues.to_string()),
            rings
                .and_then(|rings| rings.completed_per_s)
                .map_or_else(unknown, |rate| rate.to_string()),
            findings.join(", "),
        ]);
    }
    if !rows.is_empty() {
        let heading = [
            "VM",
            "NIC",
            "MAC",
            "DEVICE",
            "DRIVER",
            "QUEUES",
            "COMPLETED/S",
            "FINDINGS",
        ];
        push_table(&mut lines, &Table::new(heading, rows), styles.into_iter());
    }
    if !snapshot.operations.is_empty() {
        let table = operation::table_of(&snapshot.operations);
        push_table(&mut lines, &table, std::iter::empty());
    }
    lines
}

fn is_healthy(vm: &Vm) -> bool {
    view::health(vm).is_none_or(|health| health == "ok")
}

/// The VM and its queues.
fn details(snapshot: &Snapshot, name: &str) -> Vec<Line> {
    let vm = snapshot.vms.iter().find(|vm| vm.name == name);
    let title = vm.map_or_else(|| format!("{name} no longer exists"), view::line);
    let mut lines = vec![Line::new(&title, Style::Heading)];
    for (vm, nic) in vm
        .iter()
        .flat_map(|vm| vm.status.nic_devices.iter().map(move |nic| (vm, nic)))
    {
        let findings = view::findings(vm, &nic.id).into_iter();
        lines.extend(findings.map(|finding| alarm(&format!("{} {finding}", nic.id))));
    }
    match &snapshot.details {
        Some((of, table)) if of == name => push_table(&mut lines, table, std::iter::empty()),
        _ => lines.push(Line::new("no data about queues", Style::Plain)),
    }
    lines
}

/// Adds an empty line and a table. Rows without a style are plain.
fn push_table(lines: &mut Vec<Line>, table: &Table, styles: impl Iterator<Item = Style>) {
    lines.push(Line::new("", Style::Plain));
    let styles = std::iter::once(Style::Heading).chain(styles);
    let styles = styles.chain(std::iter::repeat(Style::Plain));
    let text = table.draw(true);
    let rows = text.lines().zip(styles);
    lines.extend(rows.map(|(row, style)| Line::new(row, style)));
}

/// Adds the last events, of one VM or of all objects.
fn push_events(lines: &mut Vec<Line>, all: &VecDeque<Event>, vm: Option<&str>) {
    let of_vm = |event: &&Event| {
        let name = event.subject.strip_prefix("/v1/vms/");
        let name = name.and_then(|rest| rest.split('/').next());
        vm.is_none() || name == vm
    };
    let mut last: Vec<&Event> = all.iter().rev().filter(of_vm).take(EVENTS).collect();
    last.reverse();
    if !last.is_empty() {
        lines.push(Line::new("", Style::Plain));
        lines.push(Line::new("EVENTS", Style::Heading));
    }
    lines.extend(
        last.into_iter()
            .map(|event| Line::new(&events::text(event), Style::Plain)),
    );
}

/// The lines that fit: those around the selected one, each at most as wide as the terminal.
pub(super) fn fitted(mut lines: Vec<Line>, (columns, rows): Size) -> Vec<Line> {
    let selected = lines.iter().position(|line| line.style == Style::Selected);
    // One more line below the selected one shows that there are more.
    let above = selected.map_or(0, |at| at.saturating_add(2).saturating_sub(rows));
    lines.drain(..above.min(lines.len()));
    lines.truncate(rows);
    for line in &mut lines {
        line.text = line.text.chars().take(columns).collect();
    }
    lines
}

/// The lines as text.
pub(super) fn text(lines: &[Line]) -> String {
    lines
        .iter()
        .map(|line| format!("{}\n", line.text))
        .collect()
}
