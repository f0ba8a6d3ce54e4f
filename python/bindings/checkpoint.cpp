// Writes parts of a training's state to the files of a checkpoint, and reads them back.
#include <ballast/safetensors.h>
#include <ballast/tensor_state.h>

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/sizes.h"
#include "kernels/state_access.h"
#include "offload/checksum.h"
#include "offload/chunk_file.h"
#include "python/bindings/bindings.h"
#include "zero/checkpoint/directory.h"
#include "zero/checkpoint/files.h"
#include "zero/runs/recorded_run.h"
#include "zero/safetensors_writer.h"

namespace ballast::python {

namespace {

std::size_t bytes_of(const StatePart& part) { return kind_of(part.memory, part.frozen).bytes(part.memory.count); }

std::span<const std::byte> memory_at(std::uintptr_t address, std::size_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

std::vector<std::size_t> begins_of(const std::vector<std::size_t>& sizes) {
  std::vector<std::size_t> begins{0};
  for (const std::size_t size : sizes) {
    begins.push_back(begins.back() + round_up(size, offload::chunk_alignment));
  }
  return begins;
}

// Chunks in host memory, for a training that changes their sources before they are written. One thread appends all of them,
// then any thread may read them, and after release() the same chunks may be appended anew.
class Snapshot {
 public:
  // The bytes of each chunk. Throws B2001 if the host has too little memory.
  Snapshot(const std::vector<std::size_t>& sizes, int threads) : sizes_(sizes), begins_(begins_of(sizes)) {
    pages_ = map_host_pages(bytes(), "the snapshot of a checkpoint", Resident::at_once, threads);
  }

  // The next chunk, which has the next of the sizes, with elements of a tensor.
  void append(const std::string& tensor, const Range& range, const StatePart& part) {
    const std::span<std::byte> chunk = next(tensor, range, bytes_of(part));
    if (is_reused_) std::ranges::fill(chunk, std::byte{0});  // new pages are zero
    kernels::copy_state(part.memory, kind_of(part.memory, part.frozen).tile(chunk.data(), part.memory.count));
  }

  void append(const std::string& tensor, const Range& range, std::span<const std::byte> bytes) {
    std::ranges::copy(bytes, next(tensor, range, bytes.size()).begin());
  }

  void write(std::size_t number, RankFiles& files) const {
    const auto& [tensor, range] = chunks_.at(number);
    files.append(tensor, range, {pages_.get() + begins_[number], sizes_[number]});
  }

  // Forgets the chunks. The memory stays, for the next ones, until the kernel needs it.
  void release() {
    chunks_.clear();
    is_reused_ = true;
    if (pages_) release_when_short(pages_);
  }

  // Whether chunks of these sizes may be appended: an interrupted save may have left its own.
  bool is_free_for(const std::vector<std::size_t>& sizes) const { return chunks_.empty() && sizes == sizes_; }
  std::size_t chunks() const { return chunks_.size(); }
  std::size_t bytes() const { return begins_.back(); }

 private:
  std::span<std::byte> next(const std::string& tensor, const Range& range, std::size_t bytes) {
    const std::size_t number = chunks_.size();
    require(number < sizes_.size() && sizes_[number] == bytes, Code::internal,
            [] { return Problem{.what = "a chunk of a snapshot has another size than was announced"}; });
    chunks_.emplace_back(tensor, range);
    return {pages_.get() + begins_[number], bytes};
  }

  std::vector<std::size_t> sizes_;
  std::vector<std::size_t> begins_;  // the first byte of each chunk, and the end of the last one
  HostPages pages_;
  std::vector<std::pair<std::string, Range>> chunks_{};
  bool is_reused_ = false;
};

void bind_parts(py::module_& module) {
  record<ChunkKind>(module, "ChunkKind", ByName(), field("parameter", &ChunkKind::parameter),
                    field("format", &ChunkKind::format), field("momentum", &ChunkKind::momentum),
                    field("variance", &ChunkKind::variance))
      .def("bytes", &ChunkKind::bytes, py::arg("elements"));
  readable<StatePart>(module, "StatePart", field("unit", &StatePart::unit), field("tensor", &StatePart::tensor),
                      field("first", &StatePart::first), field("frozen", &StatePart::frozen))
      .def(
          py::init([](DType dtype, std::uintptr_t parameter, std::uintptr_t momentum, std::uintptr_t variance,
                      const std::tuple<std::uintptr_t, std::size_t, std::size_t>& own, std::size_t count) {
            const auto [first, distance, arrays] = own;
            const auto at = [](std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); };
            return StatePart{.memory = {.parameter_dtype = dtype,
                                        .parameter = at(parameter),
                                        .momentum = at(momentum),
                                        .variance = at(variance),
                                        .own = {reinterpret_cast<float*>(first), distance, arrays},
                                        .count = count}};
          }),
          py::kw_only(), py::arg("dtype"), py::arg("parameter"), py::arg("momentum") = 0, py::arg("variance") = 0,
          py::arg("own") = std::tuple(0, 0, 0), py::arg("count"),
          "A full tensor in the caller's memory, and its moments in fp32; 0: none. `own` is the address of the first of "
          "the trainer's own values, the elements from one to the next, and their number.")
      .def_property_readonly("is_bytes", [](const StatePart& part) { return part.memory.parameter_dtype == DType::u8; })
      .def(
          "copy_from",
          [](const StatePart& part, const StatePart& from) { kernels::copy_state(from.memory, part.memory); },
          py::arg("part"), Released(), "Copy as many elements from another part.")
      .def(
          "copy_parameter_from",
          [](const StatePart& part, const StatePart& from) { kernels::copy_parameter(from.memory, part.memory); },
          py::arg("part"), Released(),
          "Copy as many elements of the parameter from another part. Moments and other state stay.")
      .def(
          "own",
          [](const StatePart& part, std::size_t number) {
            auto* const values = reinterpret_cast<std::byte*>(part.memory.own.array(number));
            return Memory{values, part.memory.count * sizeof(float), {}, py::none()};
          },
          py::arg("number"), "One of the trainer's own values, in memory that is valid while the part is visited.")
      .def(
          "elements",
          [](const StatePart& part, std::size_t first, std::size_t count) {
            StatePart found = part;
            found.first += first;
            found.memory = kernels::part(part.memory, first, count);
            return found;
          },
          py::arg("first"), py::arg("count"), "Some of its elements, counted from its first one.")
      .def_property_readonly("count", [](const StatePart& part) { return part.memory.count; });
}

// The calls with which a saving gives its chunks to files, or to a snapshot. `elements`: the first one of the tensor, and their number.
template <class Sink>
void bind_sink(py::class_<Sink>& sink) {
  using Elements = std::pair<std::size_t, std::size_t>;
  sink.def(
          "append",
          [](Sink& to, const StatePart& part, const std::string& tensor, const Elements& elements) {
            to.append(tensor, Range{elements.first, elements.second}, part);
          },
          py::arg("part"), py::arg("tensor"), py::arg("elements"), Released())
      .def(
          "append_memory",
          [](Sink& to, std::uintptr_t address, std::size_t bytes, const std::string& tensor, const Elements& elements) {
            to.append(tensor, Range{elements.first, elements.second}, memory_at(address, bytes));
          },
          py::arg("address"), py::arg("bytes"), py::arg("tensor"), py::arg("elements"), Released());
}

void bind_files(py::module_& module) {
  py::class_<Snapshot> snapshot(module, "Snapshot");
  snapshot
      .def(py::init<const std::vector<std::size_t>&, int>(), py::arg("sizes"), py::kw_only(), py::arg("threads"),
           Released())
      .def("release", &Snapshot::release, Released())
      .def("is_free_for", &Snapshot::is_free_for, py::arg("sizes"))
      .def_property_readonly("chunks", &Snapshot::chunks)
      .def_property_readonly("bytes", &Snapshot::bytes);
  const py::class_<offload::OpenRecord> record(module, "OpenRecord",
                                               "A record of a run, in a file that stays open while it is shown.");
  py::class_<RankFiles> files(module, "RankFiles");
  files.def(py::init<const std::string&, std::size_t>(), py::arg("folder"), py::arg("rank"))
      .def("clone", &RankFiles::clone, py::arg("record"), Released(), "Return whether the file system could.")
      .def(
          "append_cloned",
          [](RankFiles& to, const std::string& tensor, const std::pair<std::size_t, std::size_t>& elements,
             std::size_t in_record) {
            to.append_cloned(tensor, {elements.first, elements.second}, in_record);
          },
          py::arg("tensor"), py::arg("elements"), py::arg("in_record"), "Elements of the record that was cloned last.")
      .def(
          "append_chunk", [](RankFiles& to, const Snapshot& from, std::size_t number) { from.write(number, to); },
          py::arg("snapshot"), py::arg("number"), Released())
      .def(
          "finish",
          [](RankFiles& written, const py::bytes& extra, bool raw) {
            const std::string_view content = extra;
            const py::gil_scoped_release released;
            return written.finish(std::as_bytes(std::span(content)), raw);
          },
          py::arg("extra"), py::kw_only(), py::arg("raw"));
  bind_sink(snapshot);
  bind_sink(files);
}

void bind_reading(py::module_& module) {
  py::class_<SavedPiece>(module, "Piece")
      .def_property_readonly("first", [](const SavedPiece& piece) { return piece.range.first; })
      .def_property_readonly("count", [](const SavedPiece& piece) { return piece.range.count; })
      .def_property_readonly("file", [](const SavedPiece& piece) { return piece.place.file; })
      .def_property_readonly("offset", [](const SavedPiece& piece) { return piece.place.chunk.offset; })
      .def_property_readonly("bytes", [](const SavedPiece& piece) { return piece.place.chunk.bytes; });
  record<SavedTensor>(
      module, "SavedTensor", ByName(), field("role", &SavedTensor::role),
      field("dtype", &SavedTensor::dtype, "Torch's name."), field("item_bytes", &SavedTensor::item_bytes),
      field("shape", &SavedTensor::shape),
      preset("kind", &SavedTensor::kind, "The kind of chunks with state; None: they are elements as they are."),
      preset("steps", &SavedTensor::steps))
      .def_readwrite("steps", &SavedTensor::steps, "Steps that have trained it.")
      .def_readonly("pieces", &SavedTensor::pieces)
      .def_property_readonly("elements", &SavedTensor::elements)
      .def("chunk_bytes", &SavedTensor::chunk_bytes, py::arg("elements"))
      .def(
          "pieces_of",
          [](const SavedTensor& tensor, std::size_t first, std::size_t count) {
            return tensor.pieces_of({first, count});
          },
          py::arg("first"), py::arg("count"), "The pieces that hold these elements.");
  py::class_<SavedExtra>(module, "SavedExtra", "What a rank has saved with its tensors.")
      .def_property_readonly("file", [](const SavedExtra& extra) { return extra.file.string(); })
      .def_readonly("raw", &SavedExtra::is_raw)
      .def("read", [](const SavedExtra& extra) { return py::bytes(extra.read()); });
}

void bind_manifest(py::module_& module) {
  record<SavedGroup>(module, "SavedGroup", field("parameters", &SavedGroup::parameters),
                     field("options", &SavedGroup::options, "JSON."));
  record<SavedOptimizer>(
      module, "SavedOptimizer", ByName(), field("step", &SavedOptimizer::step),
      preset("skipped", &SavedOptimizer::skipped), field("optimizer", &SavedOptimizer::optimizer, "Its class."),
      field("moments", &SavedOptimizer::moments, "Torch's names of its momentum and variance."),
      field("groups", &SavedOptimizer::groups),
      preset("own_step", &SavedOptimizer::own_step, "Its own step makes the updates, with state of its own."),
      preset("outer_identity", &SavedOptimizer::outer_identity));
  record<SavedCheckpoint>(module, "SavedCheckpoint", ByName(), field("folder", &SavedCheckpoint::folder),
                          field("ranks", &SavedCheckpoint::ranks), field("optimizers", &SavedCheckpoint::optimizers),
                          field("tensors", &SavedCheckpoint::tensors),
                          preset("converted_from", &SavedCheckpoint::converted_from))
      .def_readonly("written_by", &SavedCheckpoint::written_by)
      .def_readonly("extras", &SavedCheckpoint::extras, "What each rank has saved with its tensors.")
      .def_property_readonly("step", &SavedCheckpoint::step)
      .def_property_readonly(
          "files",
          [](const SavedCheckpoint& saved) { return std::vector<std::string>(saved.files.begin(), saved.files.end()); })
      .def(
          "manifest",
          [](const SavedCheckpoint& saved, const std::string& folder) { return py::bytes(manifest_of(saved, folder)); },
          py::arg("folder"), "The manifest, when all ranks have written their files to the folder.");
}

void bind_manifest_files(py::module_& module) {
  module.def(
      "read_manifest",
      [](const std::string& directory) {
        const auto text = read_manifest(directory);
        return text ? std::optional(py::bytes(*text)) : std::nullopt;
      },
      py::arg("directory"), "The manifest of the checkpoint in a directory; None if there is none.");
  module.def(
      "parse_manifest",
      [](const py::bytes& manifest, const std::string& where) {
        const std::string text = manifest;
        const py::gil_scoped_release released;
        return parse_manifest(text, where);
      },
      py::arg("manifest"), py::arg("where"), "The content of a manifest. The files that it names are not read.");
  module.def(
      "read_index", [](const std::string& folder, std::size_t rank) { return py::bytes(read_index(folder, rank)); },
      py::arg("folder"), py::arg("rank"));
  module.def(
      "parse_checkpoint",
      [](const std::string& directory, const py::bytes& manifest, const std::vector<std::string>& indexes) {
        const std::string text = manifest;
        const py::gil_scoped_release released;
        return parse_checkpoint(directory, text, indexes);
      },
      py::arg("directory"), py::arg("manifest"), py::arg("indexes") = std::vector<std::string>(),
      "The checkpoint that a manifest describes. The indexes of its ranks are read, unless they are given.");
}

void bind_piece_reader(py::module_& module) {
  py::class_<PieceReader>(module, "PieceReader")
      .def(py::init([](const std::vector<std::string>& files, const std::vector<SavedPiece>& wanted) {
             return std::make_unique<PieceReader>(std::vector<std::filesystem::path>(files.begin(), files.end()),
                                                  wanted);
           }),
           py::arg("files"), py::arg("wanted"), Released())
      .def(
          "go_to",
          [](PieceReader& reader, const SavedPiece& piece, const std::string& name) { reader.go_to(piece, name); },
          py::arg("piece"), py::arg("name"), Released())
      .def(
          "copy",
          [](PieceReader& reader, const std::string& name, const SavedTensor& tensor, std::size_t first,
             const StatePart& into) { reader.copy(name, tensor, first, into.memory); },
          py::arg("name"), py::arg("tensor"), py::arg("first"), py::arg("into"), Released(),
          "Copy elements with their state, or the parameter alone.")
      .def(
          "copy_elements",
          [](PieceReader& reader, const std::string& name, const SavedTensor& tensor,
             const std::pair<std::size_t, std::size_t>& elements, std::uintptr_t into) {
            reader.copy(name, tensor, {elements.first, elements.second}, reinterpret_cast<std::byte*>(into));
          },
          py::arg("name"), py::arg("tensor"), py::arg("elements"), py::arg("into"), Released(),
          "Copy elements without state, as they are. `elements`: the first one, and their number.");
}

void bind_runs(py::module_& module) {
  py::class_<RecordedRun>(module, "RecordedRun", "The newest commit of a run.")
      .def(py::init<const std::string&, const std::string&>(), py::arg("directory"), py::arg("name"), Released())
      .def("checkpoint", &RecordedRun::checkpoint, "The commit as a checkpoint of the trained tensors.", Released())
      .def_property_readonly("trained", &RecordedRun::trained, "Their names in the order of units.")
      .def("note", [](RecordedRun& run) {
        const auto note = run.note();
        return py::bytes(reinterpret_cast<const char*>(note.data()), note.size());
      });
  module.def(
      "tell_run",
      [](const std::string& drive, const std::string& run, std::size_t rank, std::uint64_t step,
         const std::string& checkpoint) {
        write_newest_checkpoint(RecordFiles{.rank = rank}.directory(drive, run), {step, checkpoint});
      },
      py::arg("drive"), py::arg("run"), py::arg("rank"), py::arg("step"), py::arg("checkpoint"), Released(),
      "Write to a rank's directory of a run which checkpoint is its newest one.");
  module.def(
      "runs_in", [](const std::string& directory) { return runs_in(directory); }, py::arg("directory"));
}

// The format, the shape, the file and the first byte there of each tensor.
auto safetensors_in(const std::string& path) {
  std::map<std::string, std::tuple<std::string, std::vector<std::size_t>, std::string, std::size_t>> found;
  const safetensors::Source source(path);
  for (const std::string& name : source.names()) {
    const safetensors::StoredTensor& tensor = *source.find(name);
    found[name] = {std::string(tensor.format), tensor.shape, tensor.file.string(), tensor.begin};
  }
  return found;
}

using SafetensorsEntry = std::tuple<std::string, std::string, std::vector<std::size_t>, std::size_t>;

void bind_safetensors(py::module_& module) {
  module.def("safetensors_in", &safetensors_in, py::arg("path"), Released());
  py::class_<SafetensorsWriter>(module, "SafetensorsWriter")
      .def(py::init([](const std::string& folder, const std::string& stem, const std::vector<SafetensorsEntry>& entries,
                       std::optional<std::size_t> part_bytes) {
             std::vector<SafetensorsItem> items;
             items.reserve(entries.size());
             for (const auto& [name, format, shape, bytes] : entries)
               items.push_back({name, format, shape, bytes});
             return std::make_unique<SafetensorsWriter>(folder, stem, items, part_bytes.value_or(SIZE_MAX));
           }),
           py::arg("folder"), py::arg("stem"), py::arg("items"), py::arg("part_bytes"), Released())
      .def_property_readonly("names", &SafetensorsWriter::names)
      .def(
          "write",
          [](SafetensorsWriter& writer, const std::string& name, std::size_t begin, std::uintptr_t address,
             std::size_t bytes) {
            writer.write(name, begin, {reinterpret_cast<const char*>(address), bytes});
          },
          py::arg("name"), py::arg("begin"), py::arg("address"), py::arg("bytes"), Released())
      .def("finish", &SafetensorsWriter::finish, Released())
      .def("discard", &SafetensorsWriter::discard);
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_parts(module);
  bind_files(module);
  bind_reading(module);
  bind_manifest(module);
  bind_manifest_files(module);
  bind_piece_reader(module);
  bind_runs(module);
  bind_safetensors(module);
  py::class_<CheckpointDirectory>(module, "CheckpointDirectory")
      .def(py::init<const std::string&>(), py::arg("directory"))
      .def_property_readonly("warning", &CheckpointDirectory::warning, "Says why it is not locked; empty: it is.")
      .def("require_same_history", &CheckpointDirectory::require_same_history, py::arg("known"), py::arg("ours"),
           "The current folder, or an empty text. Raises B2204 if another job has saved it.")
      .def("create", &CheckpointDirectory::create, py::arg("folder"))
      .def(
          "make_current",
          [](CheckpointDirectory& directory, const std::string& folder, const py::bytes& manifest) {
            const std::string text = manifest;
            const py::gil_scoped_release released;
            directory.make_current(folder, text);
          },
          py::arg("folder"), py::arg("manifest"))
      .def("remove_stale", &CheckpointDirectory::remove_stale, Released())
      .def("discard", &CheckpointDirectory::discard, py::arg("folder"), Released())
      .def("release", &CheckpointDirectory::release);
  module.def(
      "require_space", [](const std::string& directory, std::uint64_t needed) { require_space(directory, needed); },
      py::arg("directory"), py::arg("needed"), "Raises B2202 unless the drive of a directory has so many free bytes.");
  module.def(
      "checksum",
      [](const py::buffer& bytes) {
        const py::buffer_info info = bytes.request();
        const std::span<const std::byte> memory(static_cast<const std::byte*>(info.ptr),
                                                static_cast<std::size_t>(info.size * info.itemsize));
        const py::gil_scoped_release released;
        return offload::checksum(memory);
      },
      py::arg("bytes"), "XXH3-64 of contiguous memory.");
}

}  // namespace ballast::python
