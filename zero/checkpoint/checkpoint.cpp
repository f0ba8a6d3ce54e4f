#include "zero/checkpoint/checkpoint.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <random>
#include <utility>

#include "kernels/state_access.h"
#include "zero/checkpoint/directory.h"
#include "zero/comm/message.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/plan/names_in_files.h"
#include "zero/plan/state_parts.h"

namespace ballast {
namespace {

constexpr std::size_t index_bytes = 128;  // what a chunk takes in a rank's index

std::string value_name(const std::string& tensor, std::size_t number) {
  return fmt::format("{}: value {}", tensor, number);
}

// It does work that may fail, in several parts, and keeps the first failure for an agreement.
class Attempt {
 public:
  void operator()(const std::function<void()>& work) {
    if (failure_) return;
    try {
      work();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  // All ranks call it together.
  void settle(Communicator& world) const {
    on_all_ranks(world, [&] {
      if (failure_) std::rethrow_exception(failure_);
    });
  }

 private:
  std::exception_ptr failure_{};
};

// A training as its checkpoints name it.
struct NamedState {
  explicit NamedState(const CompiledPlan& of) : plan(of), names(names_of_whole_units(of.model())) {}

  const std::string& name(const StatePart& part) const { return names[part.unit][part.tensor]; }
  std::size_t own_values() const { return plan.names().own_values; }

  const CompiledPlan& plan;
  const std::vector<std::vector<std::string>> names;
};

// --- Saving ---

void add(SavedTensors& tensors, const std::string& name, SavedTensor tensor) {
  const bool is_new = tensors.emplace(name, std::move(tensor)).second;
  require(is_new, Code::bad_argument, [&] {
    return Problem{.what = "cannot save the training: two tensors would have the same name",
                   .where = name,
                   .needed = "names of units and tensors that differ when they are joined with a dot"};
  });
}

SavedCheckpoint checkpoint_of(const NamedState& state, std::uint64_t step) {
  SavedCheckpoint saved = saved_of(state.plan, state.names, step);
  const SavedTensors tensors = saved.tensors;
  for (const auto& [name, tensor] : tensors) {
    for (std::size_t number = 0; tensor.kind && number < state.own_values(); ++number)
      add(saved.tensors, value_name(name, number),
          {.role = "own", .dtype = "float32", .item_bytes = sizeof(float), .shape = tensor.shape});
  }
  saved.converted_from = "a training in C++";
  return saved;
}

// The parts that this rank writes. Ranks may keep more of frozen parameters than their shard; those that keep the same shard take turns.
class OwnParts {
 public:
  explicit OwnParts(const CompiledPlan& plan, std::size_t own) : plan_(plan) {
    for (std::size_t rank = 0; rank < plan.placement().ranks(); ++rank) {
      if (shard_of(plan.placement(), rank) != shard_of(plan.placement(), own)) continue;
      if (rank == own) own_turn_ = sharing_;
      ++sharing_;
    }
  }

  bool takes_turns() const { return sharing_ > 1; }

  // Call it for all tiles, in order; where ranks take no turns, for any.
  std::vector<StatePart> in(const LocalTile& tile) {
    LocalTile own = tile;
    if (tile.frozen) {
      own.range = intersection(tile.range,
                               plan_.layout().units[tile.unit].frozen.shard_range(plan_.input().rank_in_shard_group));
      if (own.range.count == 0) return {};
      if (tile.memory.parameter != nullptr)
        own.memory = kernels::part(tile.memory, own.range.first - tile.range.first, own.range.count);
    }
    std::vector<StatePart> parts;
    for (const PartOfTile& each : parts_in(plan_, own)) {
      if (turn_++ % sharing_ == own_turn_) parts.push_back(each.part);
    }
    return parts;
  }

 private:
  const CompiledPlan& plan_;
  std::size_t own_turn_ = 0;
  std::size_t sharing_ = 0;
  std::size_t turn_ = 0;
};

void write(const NamedState& state, const StatePart& part, RankFiles& files) {
  const std::string& name = state.name(part);
  const Range range{part.first, part.memory.count};
  files.append(name, range, part);
  for (std::size_t number = 0; !part.frozen && number < state.own_values(); ++number)
    files.append(value_name(name, number), range, std::as_bytes(std::span(part.memory.own.array(number), range.count)));
}

std::uint64_t bytes_of(const NamedState& state, const SavedTensors& tensors, const std::vector<LocalTile>& tiles,
                       std::size_t rank) {
  std::uint64_t bytes = 0;
  OwnParts own(state.plan, rank);
  for (const LocalTile& tile : tiles) {
    for (const StatePart& part : own.in(tile)) {
      const std::size_t values = part.frozen ? 0 : state.own_values();
      bytes += tensors.at(state.name(part)).chunk_bytes(part.memory.count) + index_bytes +
               values * (part.memory.count * sizeof(float) + index_bytes);
    }
  }
  return bytes;
}

// Throws B2202 if all ranks together have more to write than fits.
void require_space_of_all(const CheckpointPlace& place, std::uint64_t own_bytes) {
  std::int64_t needed = static_cast<std::int64_t>(own_bytes);
  place.world.all_reduce({&needed, 1});
  on_all_ranks(place.world, [&] { require_space(place.directory, static_cast<std::uint64_t>(needed)); });
}

// Two models would replace each other's checkpoints. One that cannot be read is replaced.
void require_same_model(const std::filesystem::path& directory, const SavedTensors& tensors) {
  SavedTensors there;
  try {
    const auto manifest = read_manifest(directory);
    if (manifest) there = parse_manifest(*manifest, directory).tensors;
  } catch (const Error&) {
  }
  const bool is_same =
      there.empty() || std::ranges::any_of(tensors, [&](const auto& each) { return there.contains(each.first); });
  require(is_same, Code::bad_argument, [&] {
    return Problem{.what = "cannot replace a checkpoint of another model: it has no tensor with a name of this model",
                   .where = directory.string(),
                   .needed = "one directory for each model, and for each part of a model that different ranks hold",
                   .available = fmt::format("a checkpoint with {}", there.begin()->first),
                   .remedy = "Save to another directory, or remove the checkpoint that is there."};
  });
}

// If this saving fails, either checkpoint may be the current one, and the next saving may replace both.
void require_same_history(const CheckpointPlace& place, const CheckpointDirectory& directory,
                          const std::string& folder) {
  std::set<std::string> ours;
  for (const auto& [path, folders] : place.known)
    ours.insert(folders.begin(), folders.end());
  std::set<std::string>& here = place.known[std::filesystem::weakly_canonical(place.directory)];
  here.insert({folder, directory.require_same_history(here, ours)});
}

std::string new_folder(Communicator& world, std::uint64_t step) {
  std::int64_t token = world.rank() == 0 ? static_cast<std::int64_t>(std::random_device()()) : 0;
  world.all_reduce({&token, 1});
  return fmt::format("step-{}-{:08x}", step, static_cast<std::uint32_t>(token));
}

}  // namespace

SavedCheckpoint saved_of(const CompiledPlan& plan, const std::vector<std::vector<std::string>>& names,
                         std::uint64_t step) {
  SavedCheckpoint saved{.optimizers = {{.step = step,
                                        .optimizer = plan.rule(),
                                        .moments = moments_of(plan.names()),
                                        .own_step = plan.names().own_values > 0}}};
  const std::vector<Unit>& units = plan.model().units;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    std::byte anywhere{};
    const ChunkKind kind = kind_of(plan.blocks().state(unit, 0).tile(&anywhere), false);
    for (std::size_t tensor = 0; tensor < units[unit].tensors.size(); ++tensor) {
      const Tensor& described = units[unit].tensors[tensor];
      SavedTensor made{.role = described.frozen ? "frozen" : "trained",
                       .dtype = torch_name(units[unit].dtype),
                       .item_bytes = byte_size(units[unit].dtype),
                       .shape = described.shape,
                       .kind = described.frozen ? std::nullopt : std::optional(kind),
                       .steps = described.frozen ? 0 : step};
      add(saved.tensors, names[unit][tensor], std::move(made));
    }
  }
  return saved;
}

void save_checkpoint(const CheckpointPlace& place, std::uint64_t step, std::span<const std::byte> note,
                     const std::vector<LocalTile>& tiles,
                     const std::function<void(const TileVisitor& visitor, const TileFilter& which)>& visit) {
  Communicator& world = place.world;
  const NamedState state(place.plan);
  SavedCheckpoint checkpoint = checkpoint_of(state, step);
  checkpoint.folder = new_folder(world, step);
  checkpoint.ranks = world.size();
  const std::filesystem::path folder = place.directory / checkpoint.folder;
  std::optional<CheckpointDirectory> directory;  // of rank 0, which locks it for all
  try {
    on_all_ranks(world, [&] {
      if (world.rank() > 0) return;
      directory.emplace(place.directory);
      const std::string warning = directory->warning();
      if (!warning.empty() && place.log != nullptr) place.log->warning(warning);
      require_same_model(place.directory, checkpoint.tensors);
      require_same_history(place, *directory, checkpoint.folder);
      directory->create(checkpoint.folder);
    });
    on_all_ranks(world, [&] {
      require(std::filesystem::is_directory(folder), Code::bad_argument, [&] {
        return Problem{.what = "cannot save a checkpoint: not all ranks see the directory",
                       .where = folder.string(),
                       .needed = "a directory that all machines share"};
      });
    });
    require_space_of_all(place, bytes_of(state, checkpoint.tensors, tiles, world.rank()) + note.size());
    std::optional<RankFiles> files;
    on_all_ranks(world, [&] { files.emplace(folder, world.rank()); });
    Attempt attempt;
    OwnParts own(place.plan, world.rank());
    const auto is_not_cloned = [&](const LocalTile& tile) {
      if (tile.record == nullptr || own.takes_turns() || !files->clone(*tile.record)) return true;
      for (const auto& [part, in_tile] : parts_in(place.plan, tile))
        files->append_cloned(state.name(part), {part.first, part.memory.count}, in_tile);
      return false;
    };
    const auto write_tile = [&](const LocalTile& tile) {
      for (const StatePart& part : own.in(tile))
        attempt([&] { write(state, part, *files); });
    };
    attempt([&] { visit(write_tile, is_not_cloned); });
    attempt([&] { files->finish(note, true); });
    attempt.settle(world);
    on_all_ranks(world, [&] {
      if (directory) directory->make_current(checkpoint.folder, manifest_of(checkpoint, folder));
    });
  } catch (...) {
    if (directory) directory->discard(checkpoint.folder);
    throw;
  }
  on_all_ranks(world, [&] {
    if (directory) directory->remove_stale();
  });
}

// --- Loading ---

namespace {

[[noreturn]] void refuse(const CheckpointPlace& place, const std::string& what, const std::string& needed = {},
                         const std::string& available = {}) {
  fail(Code::run_mismatch, {.what = fmt::format("cannot load the checkpoint in {}: {}", place.directory.string(), what),
                            .needed = needed,
                            .available = available,
                            .remedy = "Load a checkpoint of this model and rule. Nothing was changed."});
}

// What a rank reads of a checkpoint.
class StateLoading {
 public:
  // Refuses what does not fit, before anything is changed. Opens what is read for these tiles, in their order.
  StateLoading(const CheckpointPlace& place, const std::string& manifest, const std::vector<std::string>& indexes,
               const std::vector<LocalTile>& tiles)
      : place_(place), saved_(parse_checkpoint(place.directory, manifest, indexes)), state_(place.plan) {
    require_same_rule();
    require_same_tensors();
    std::vector<SavedPiece> wanted;
    for (const LocalTile& tile : tiles) {
      for (const auto& [part, in_tile] : parts_in(place_.plan, tile)) {
        for (const SavedTensor* tensor : tensors_of(part)) {
          const auto pieces = tensor->pieces_of({part.first, part.memory.count});
          wanted.insert(wanted.end(), pieces.begin(), pieces.end());
        }
      }
    }
    reader_.emplace(saved_.files, wanted);
    loaded_ = {saved_.step(), note()};
  }
  StateLoading(StateLoading&&) = delete;

  const SavedCheckpoint& saved() const { return saved_; }
  const LoadedCheckpoint& loaded() const { return loaded_; }

  void fill(const StatePart& part) {
    const std::vector<const SavedTensor*> tensors = tensors_of(part);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::string& name = state_.name(part);
      if (i == 0) {
        reader_->copy(name, *tensors[i], part.first, part.memory);
      } else {
        auto* const values = reinterpret_cast<std::byte*>(part.memory.own.array(i - 1));
        reader_->copy(value_name(name, i - 1), *tensors[i], {part.first, part.memory.count}, values);
      }
    }
  }

 private:
  std::vector<std::byte> note() const {
    const SavedExtra& extra = saved_.extras[place_.world.rank() % saved_.extras.size()];
    if (!extra.is_raw) return {};  // an object of Python
    require(extra.bytes <= offload::max_note_bytes, Code::wrong_size, [&] {
      return Problem{.what = "cannot load the checkpoint: its note does not fit into a commit",
                     .where = extra.file.string(),
                     .needed = fmt::format("at most {} bytes", offload::max_note_bytes),
                     .available = fmt::format("{} bytes", extra.bytes),
                     .remedy = "Save less as extra= from Python. Nothing was changed."};
    });
    const std::string note = extra.read();
    const auto bytes = std::as_bytes(std::span(note));
    return {bytes.begin(), bytes.end()};
  }

  // The tensor, then the trainer's own values of it. None of a frozen one that is not saved.
  std::vector<const SavedTensor*> tensors_of(const StatePart& part) const {
    const std::string& name = state_.name(part);
    if (!saved_.tensors.contains(name)) return {};
    std::vector<const SavedTensor*> tensors{&saved_.tensors.at(name)};
    for (std::size_t number = 0; !part.frozen && number < state_.own_values(); ++number)
      tensors.push_back(&saved_.tensors.at(value_name(name, number)));
    return tensors;
  }

  void require_same_rule() const {
    const optim::StateNames& own = place_.plan.names();
    const SavedOptimizer& first = saved_.optimizers.front();
    const bool is_same =
        saved_.optimizers.size() == 1 && first.moments == moments_of(own) && first.own_step == (own.own_values > 0);
    if (is_same) return;
    refuse(place_, "it is of another update rule", fmt::format("the state of {}", place_.plan.rule()),
           saved_.optimizers.size() > 1 ? fmt::format("that of {} optimizers", saved_.optimizers.size())
                                        : fmt::format("that of {}", first.optimizer));
  }

  void require_same_tensors() const {
    const SavedTensors own = checkpoint_of(state_, 0).tensors;
    for (const auto& [name, here] : own) {
      const auto found = saved_.tensors.find(name);
      if (found == saved_.tensors.end()) {
        if (here.role == "frozen") continue;
        refuse(place_, fmt::format("it lacks {}{}", here.kind ? "the trained parameter " : "", name));
      }
      const SavedTensor& saved = found->second;
      if (saved.shape != here.shape) {
        refuse(place_, fmt::format("it has parameter {} [{}], but this model has [{}]", name,
                                   fmt::join(saved.shape, ", "), fmt::join(here.shape, ", ")));
      }
      if (here.kind && !saved.kind) refuse(place_, fmt::format("it has no state of {}, which is trained here", name));
      if (!here.kind && !saved.kind && saved.dtype != here.dtype)
        refuse(place_, fmt::format("it has {} in {}, which is {} here", name, saved.dtype, here.dtype));
    }
    for (const auto& [name, saved] : saved_.tensors) {
      if (saved.kind && !own.contains(name))
        refuse(place_, fmt::format("it has a trained parameter {}, which this model lacks", name));
    }
  }

  const CheckpointPlace& place_;
  const SavedCheckpoint saved_;
  const NamedState state_;
  LoadedCheckpoint loaded_{};
  std::optional<PieceReader> reader_{};
};

// A parameter that had no gradient in some steps has made fewer: this training goes on as if it had made all.
void warn_of_missed_steps(const SavedCheckpoint& saved, const CheckpointPlace& place) {
  for (const auto& [name, tensor] : saved.tensors) {
    if (tensor.role != "trained" || tensor.steps == saved.step() || place.log == nullptr || place.world.rank() > 0)
      continue;
    place.log->warning(
        fmt::format("the checkpoint in {} has {} after {} of {} steps; its bias correction counts from {}",
                    place.directory.string(), name, tensor.steps, saved.step(), saved.step()));
    return;
  }
}

// Changes this rank's state while all ranks do the same. What fails on one rank fails on all, before drives commit.
void change_together(const StateChange& change, const TileVisitor& visitor, const LoadedCheckpoint& loaded,
                     Communicator& world) {
  Attempt attempt;
  bool has_settled = false;
  try {
    change([&](const LocalTile& tile) { attempt([&] { visitor(tile); }); },
           [&] {
             has_settled = true;
             attempt.settle(world);
             return loaded;
           });
  } catch (...) {  // a rank that cannot read its own state tells the others, which wait for it
    if (has_settled) throw;
    attempt([] { throw; });
    try {
      attempt.settle(world);
    } catch (const Error& error) {
      if (error.code() != Code::peer_failed) throw;
    }
    throw;  // the rank's own error says more than that another one failed
  }
}

constexpr int most_reads = 5;  // of checkpoints that other jobs replace meanwhile

// The manifest that rank 0 reads; empty: there is none. All ranks call it together.
std::string manifest_of_all(const CheckpointPlace& place) {
  std::optional<std::string> manifest;
  on_all_ranks(place.world, [&] {
    if (place.world.rank() == 0) manifest = read_manifest(place.directory);
  });
  return broadcast_text(place.world, manifest.value_or(""), 0);
}

// The texts of all indexes. One rank reads each and tells the others: a file system does not carry N^2 opens for N ranks. All ranks
// call it together.
std::vector<std::string> indexes_of_all(const CheckpointPlace& place, const std::string& manifest) {
  const std::size_t ranks = place.world.size();
  std::size_t count = 0;
  std::vector<std::string> mine;
  on_all_ranks(place.world, [&] {
    const SavedCheckpoint saved = parse_manifest(manifest, place.directory / manifest_name);
    count = saved.ranks;
    for (std::size_t index = place.world.rank(); index < count; index += ranks)
      mine.push_back(read_index(place.directory / saved.folder, index));
  });
  std::vector<std::string> indexes(count);
  const std::vector<std::string> texts = texts_of_all(place.world, join(mine));
  for (std::size_t rank = 0; rank < std::min(ranks, count); ++rank) {
    std::size_t index = rank;
    for (std::string& text : split(texts[rank])) {
      indexes.at(index) = std::move(text);
      index += ranks;
    }
  }
  return indexes;
}

}  // namespace

bool load_checkpoint(const CheckpointPlace& place, const std::vector<LocalTile>& tiles, const StateChange& change) {
  std::optional<StateLoading> loading;
  for (int read = 1; !loading; ++read) {
    const std::string manifest = manifest_of_all(place);
    if (manifest.empty()) return false;
    try {
      const std::vector<std::string> indexes = indexes_of_all(place, manifest);
      on_all_ranks(place.world, [&] { loading.emplace(place, manifest, indexes, tiles); });
    } catch (const Error&) {  // the same on all ranks
      loading.reset();
      if (read == most_reads || manifest_of_all(place) == manifest) throw;
    }
  }
  warn_of_missed_steps(loading->saved(), place);
  const auto fill = [&](const LocalTile& tile) {
    for (const PartOfTile& each : parts_in(place.plan, tile))
      loading->fill(each.part);
  };
  change_together(change, fill, loading->loaded(), place.world);
  place.known[std::filesystem::weakly_canonical(place.directory)] = {loading->saved().folder};
  return true;
}

}  // namespace ballast
