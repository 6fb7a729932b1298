//! Groups of the host, from `/etc/group`.
//!
//! It is parsed here because a statically linked program has no NSS, which `nix` and `uzers` need
//! (getgrnam). The crates that read the file (`pgs-files`, `parsswd`) are abandoned.

/// The file.
pub const PATH: &str = "/etc/group";

/// Names and numbers in the file's `text` (group(5): `name:password:number:members`).
pub fn parse(text: &str) -> impl Iterator<Item = (&str, u32)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        Some((fields.next()?, fields.nth(1)?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_no_groups_are_left_out() {
        let text = "root:x:0:\n\nbroken\nkvm:x:104:a,b\nkvm2:x:no:\n+\n";
        let groups: Vec<_> = parse(text).collect();
        assert_eq!(groups, [("root", 0), ("kvm", 104)]);
    }
}
