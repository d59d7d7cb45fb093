//! Plain-text layout: aligned columns, sizes, wrapped paragraphs.

/// Lines of cells, each column as wide as its widest cell, two spaces between; no spaces at line ends.
pub fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..count).map(|column| width(column).unwrap_or(0)).collect();
    (rows.iter())
        .map(|row| {
            let line: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
            line.join("  ").trim_end().to_owned()
        })
        .collect()
}

/// Bytes in IEC units: `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    oasis_core::config::Bytes(bytes).to_string()
}

/// A number with a separator every three digits: `12,288`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_do_not_trail() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        assert_eq!(columns(&[row(["a", "bcd"]), row(["long", ""])]), ["a     bcd", "long"]);
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
