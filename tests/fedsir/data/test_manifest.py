from __future__ import annotations

from pathlib import Path

import pytest

from fedsir.data.manifest import read_manifest
from fedsir.errors import BadInput


def write(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    manifest = folder / "m.csv"
    manifest.write_bytes(text.encode(encoding))
    return manifest


def error(folder: Path, text: str, labels: list[str] | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        read_manifest(write(folder, text), folder, labels)
    return str(caught.value)


def test_bom_quotes_unicode_blank_lines_and_windows_paths(tmp_path: Path) -> None:
    text = (
        '\ufeffpath, Label ,patient_id,site\r\n"scans/ä, 1.png","GA ""x""",Ünal,Chicago\r\n\r\n'
        "b\\2.png, NGA ,7,Winston\r\n"
    )
    rows, notes = read_manifest(write(tmp_path, text), tmp_path, None)
    assert [(row.path, row.label, row.patient_id, row.site) for row in rows] == [
        ("scans/ä, 1.png", 'GA "x"', "Ünal", "Chicago"),
        ("b/2.png", "NGA", "7", "Winston"),
    ]
    assert [(row.line, row.split) for row in rows] == [(2, None), (4, None)]
    assert notes == []


def test_val_trains_and_unused_columns_are_noted(tmp_path: Path) -> None:
    text = "path,label,patient_id,split,eye,age,sex\na,A,1,val,,60,f\nb,A,2,test,OD,61,m\nc,A,3,train,,,\n"
    rows, notes = read_manifest(write(tmp_path, text), tmp_path, None)
    assert [row.split for row in rows] == ["train", "test", "train"]
    assert notes == ["manifest columns not used: age, sex"]


def test_all_bad_lines_are_reported_together(tmp_path: Path) -> None:
    text = (
        "path,label,patient_id,split\n"
        "a.png,GA,1,train\n"
        "b.png,,2,train\n"
        ",GA,,test\n"
        "./a.png,GA,3,train\n"
        "c.png,GAA,3,dev\n"
        "d.png,GA,4\n"
        "e.png,GA,5,\n"
    )
    lines = error(tmp_path, text, ["GA", "NGA"]).splitlines()
    assert lines[0].endswith("has lines that cannot be used:")
    assert lines[1:] == [
        "  line 3: label is empty",
        "  line 4: path is empty",
        "  line 4: patient_id is empty",
        "  line 5: path ./a.png is already on line 2",
        "  line 6: split is 'dev', not train, val or test",
        "  line 6: label 'GAA' is in none of data.classes",
        "  line 7: 3 cells under 4 columns",
        "  line 8: split is empty",
        "Mend these lines. Labels in data.classes: GA, NGA.",
    ]


def test_many_bad_lines_are_counted_and_multiline_cells_keep_line_numbers(tmp_path: Path) -> None:
    text = 'path,label,patient_id,eye\na.png,GA,1,"two\nlines"\n' + "".join(f"{i}.png,,1,\n" for i in range(12))
    found = error(tmp_path, text)
    assert "  line 4: label is empty\n" in found
    assert "... and 2 more (12 in all)" in found


@pytest.mark.parametrize(
    "path", ["../x.png", "a\0.png", "a/../x.png", "/etc/passwd", "C:/x.png", "\\\\server\\x.png", "..\\x"]
)
def test_paths_out_of_the_root_are_refused(tmp_path: Path, path: str) -> None:
    assert "  line 2: path" in error(tmp_path, f"path,label,patient_id\n{path},A,1\n")


def test_links_out_of_the_root_are_refused_and_others_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
        (folder / "x.png").write_bytes(b"x")
    (root / "inner").symlink_to("x.png")
    (root / "file").symlink_to(outside / "x.png")
    (root / "folder").symlink_to(outside)
    assert read_manifest(write(root, "path,label,patient_id\ninner,A,1\n"), root, None)
    found = error(root, "path,label,patient_id\nfile,A,1\nfolder/x.png,A,1\n")
    assert "line 2: path file is a link out of" in found
    assert "line 3: path folder/x.png is a link out of" in found


def test_a_root_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    manifest = write(tmp_path, "path,label,patient_id\nx.png,A,1\n")
    assert len(read_manifest(manifest, tmp_path / "root", None)[0]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the columns path, label, patient_id; its first line has: nothing"),
        ("path,label\na,b\n", "lacks the column patient_id; its first line has: path, label"),
        ("path;label;patient_id\na;b;c\n", "separated by semicolons"),
        ("path,label,patient_id,label\na,b,c,d\n", "more than one column label"),
        ("path,label,patient_id\n", "lists no images"),
        ('path,label,patient_id\n"a,b,c\n', "not a well-formed CSV file"),
    ],
)
def test_a_file_that_is_no_manifest(tmp_path: Path, text: str, message: str) -> None:
    assert message in error(tmp_path, text)


def test_missing_file_folder_and_encoding(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"(?s)does not exist.*columns path,label,patient_id.*data.manifest"):
        read_manifest(tmp_path / "none.csv", tmp_path, None)
    with pytest.raises(BadInput, match="cannot be read"):
        read_manifest(tmp_path, tmp_path, None)
    with pytest.raises(BadInput, match="not UTF-8"):
        read_manifest(write(tmp_path, "path,label,patient_id\nä,b,c\n", "latin-1"), tmp_path, None)
