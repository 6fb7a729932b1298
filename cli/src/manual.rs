//! Manual pages of the command and of each subcommand in roff, generated from the same tree as the
//! help.
//!
//! Owns the layout of a page.

use std::io;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

/// A manual page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Page {
    /// The file name, such as `bellhop-run.1`.
    pub(crate) file_name: String,
    /// The contents of the file.
    pub(crate) text: Vec<u8>,
}

/// The pages of a command and of all its visible subcommands, its own first.
pub(crate) fn pages(command: Command) -> io::Result<Vec<Page>> {
    // It would repeat the help, which is here already.
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, &command, &mut pages)?;
    Ok(pages)
}

fn add_pages(command: &Command, root: &Command, pages: &mut Vec<Page>) -> io::Result<()> {
    pages.push(page(command, root)?);
    for command in shown(command) {
        add_pages(command, root, pages)?;
    }
    Ok(())
}

/// The subcommands that the help lists.
pub(crate) fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
}

fn page(command: &Command, root: &Command) -> io::Result<Page> {
    let version = root.get_version().unwrap_or_default();
    let source = format!("{} {version}", root.get_name());
    let man = Man::new(command.clone())
        .source(source)
        .manual("Bellhop Manual");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    if command
        .get_arguments()
        .any(|argument| !argument.is_hide_set())
    {
        man.render_options_section(&mut text)?;
    }
    if shown(command).next().is_some() {
        man.render_subcommands_section(&mut text)?;
    }
    let mut roff = Roff::default();
    let help = command
        .get_after_long_help()
        .or_else(|| command.get_after_help());
    if let Some(help) = help {
        notes(&help.to_string(), &mut roff);
    }
    if !std::ptr::eq(command, root) {
        see_also(command, root, &mut roff);
    }
    roff.to_writer(&mut text)?;
    Ok(Page {
        file_name: man.get_filename(),
        text,
    })
}

/// The text below the options in the help: paragraphs; each line of a list or of examples stays a
/// line.
fn notes(help: &str, roff: &mut Roff) {
    let mut section = "";
    let mut as_it_is = false;
    for line in help.lines() {
        let is_indented = line.starts_with(' ');
        if as_it_is && !is_indented {
            roff.control("fi", []);
            as_it_is = false;
        }
        let title = match line {
            "Examples:" => Some("EXAMPLES"),
            "Exit codes:" => Some("EXIT STATUS"),
            _ if line.is_empty() => {
                roff.control("PP", []);
                continue;
            }
            // After the examples.
            _ if !is_indented && (section.is_empty() || section == "EXAMPLES") => Some("NOTES"),
            _ => None,
        };
        if let Some(title) = title
            && title != section
        {
            roff.control("SH", [title]);
            section = title;
        }
        if matches!(line, "Examples:" | "Exit codes:") {
            continue;
        }
        if is_indented && !as_it_is {
            roff.control("nf", []);
            as_it_is = true;
        }
        let line = line.strip_prefix("  ").unwrap_or(line);
        roff.text([roman(line)]);
    }
    if as_it_is {
        roff.control("fi", []);
    }
}

/// The parent page, and the page with the exit codes.
fn see_also(command: &Command, root: &Command, roff: &mut Roff) {
    let name = |command: &Command| {
        let name = command.get_display_name();
        name.unwrap_or_else(|| command.get_name()).to_owned()
    };
    let own = name(command);
    let mut text: Vec<Inline> = vec![bold(name(root)), roman("(1), with the exit codes")];
    if let Some((above, _)) = own.rsplit_once('-')
        && above != name(root)
    {
        text.extend([roman("; "), bold(above), roman("(1)")]);
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text(text);
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn walk(command: &Command, look: &mut impl FnMut(&Command)) {
        look(command);
        for command in shown(command) {
            walk(command, look);
        }
    }

    #[test]
    fn the_tree_is_sound() {
        crate::Arguments::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_an_example_of_its_own_in_its_help() {
        let mut root = crate::Arguments::command().disable_help_subcommand(true);
        root.build();
        let mut without = Vec::new();
        walk(&root, &mut |command| {
            let name = command.get_bin_name().unwrap_or_default();
            let help = command
                .get_after_long_help()
                .or_else(|| command.get_after_help());
            let help = help.map(ToString::to_string).unwrap_or_default();
            let example = help.lines().any(|line| {
                line.strip_prefix("  ")
                    .is_some_and(|line| line.contains(name))
            });
            if !example {
                without.push(name.to_owned());
            }
        });
        // The command alone is not an example; its help lists the subcommands.
        without.retain(|name| name != "bellhop");
        assert!(without.is_empty(), "without an example: {without:#?}");
    }

    #[test]
    fn every_subcommand_has_a_page() {
        let pages = pages(crate::Arguments::command()).unwrap();
        let mut root = crate::Arguments::command().disable_help_subcommand(true);
        root.build();
        let mut count = 0;
        walk(&root, &mut |_| count += 1);
        assert_eq!(pages.len(), count);
        assert_eq!(pages[0].file_name, "bellhop.1");
        let mut names: Vec<_> = pages.iter().map(|page| &page.file_name).collect();
        names.dedup();
        assert_eq!(names.len(), count);
        for page in &pages {
            let text = String::from_utf8(page.text.clone()).unwrap();
            assert!(text.contains("\n.TH bellhop"), "{text}");
            assert!(text.contains(".SH NAME\nbellhop"), "{text}");
            let opened = text.matches("\n.nf\n").count();
            assert_eq!(opened, text.matches("\n.fi\n").count(), "{text}");
        }
        let root = String::from_utf8(pages[0].text.clone()).unwrap();
        assert!(root.contains(".SH \"EXIT STATUS\""), "{root}");
        assert!(root.contains("128+N"));
        let make = pages
            .iter()
            .find(|page| page.file_name == "bellhop-nic-create.1");
        let make = String::from_utf8(make.unwrap().text.clone()).unwrap();
        assert!(make.contains(".SH EXAMPLES"));
        assert!(make.contains("bellhop\\-nic"));
    }
}
