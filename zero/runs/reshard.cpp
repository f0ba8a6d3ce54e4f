#include "zero/runs/reshard.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/state_access.h"
#include "kernels/update.h"
#include "zero/comm/on_all_ranks.h"

namespace ballast {
namespace {

constexpr std::size_t records_under_way = 2;  // one is filled while the other is written

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

offload::RecordStore* EarlierRecords::opened(const WholeRun::Copy& copy) {
  const auto [found, is_new] = stores_.try_emplace(name_of(copy));
  if (is_new) {
    const RecordFiles files = run_.files_of(copy);
    offload::RecordShape shape = shape_;
    shape.rank = static_cast<std::uint32_t>(copy.rank);
    offload::StoreOptions unchanged = own_.files_of(files);
    unchanged.file.writable = false;
    offload::RecordStore store = offload::RecordStore::open(shape, own_.drives(files), unchanged);
    if (store.go_to(run_.point)) found->second.emplace(std::move(store));
  }
  return found->second ? &*found->second : nullptr;
}

offload::RecordStore& EarlierRecords::store_of(const WholeRun::Copy& copy) {
  offload::RecordStore* const store = opened(copy);
  require(store != nullptr, Code::bad_record, [&] {
    return Problem{.what = "cannot take over records: some of them are missing or damaged",
                   .where = run_.files_of(copy).directory(own_.options.directories.front(), own_.name())};
  });
  return *store;
}

bool EarlierRecords::are_intact(const WholeRun::Copy& copy) {
  try {
    for (std::size_t record = 0; record < shape_.tiles; ++record)
      read(copy, record);
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    if (own_.options.log != nullptr) own_.options.log->warning(error.what());
    return false;
  }
  return true;
}

std::span<std::byte> EarlierRecords::read(const WholeRun::Copy& copy, std::size_t record) {
  offload::RecordStore& store = store_of(copy);
  const std::pair wanted(name_of(copy), record);
  if (in_memory_ == wanted) return payload_;
  if (!memory_) memory_ = map_host_pages(store.record_bytes(), "a record that is taken over");
  in_memory_ = {{SIZE_MAX, false}, 0};  // until the record is there
  payload_ = store.read(record, {memory_.get(), store.record_bytes()}).payload();
  in_memory_ = wanted;
  return payload_;
}

Resharding::Resharding(const OwnRun& own, const WholeRun& run, const RecordedState& state, EarlierRecords& records,
                       Communicator& world)
    : own_(own), run_(run), state_(state), records_(records), world_(world), names_(names_in_runs(own.plan.model())) {
  for (std::size_t rank = 0; rank < world.size(); ++rank) {
    for (std::size_t shard = 0; shard < run.copies.size(); ++shard) {
      if (!sees(rank, shard)) receivers_.insert(rank);
    }
  }
}

bool Resharding::sees(std::size_t rank, std::size_t shard) const { return run_.nearest(shard, rank).seen_by == rank; }

// A note may hold what only the rank knows that has written it. So each rank gets those of all.
std::vector<std::byte> Resharding::note() {
  const auto copy_of = [&](std::size_t rank) -> const WholeRun::Copy* {
    for (const auto& copies : run_.copies) {
      const auto found = std::ranges::find(copies, rank, &WholeRun::Copy::rank);
      if (found != copies.end()) return &*found;
    }
    return nullptr;  // the rank's records are missing, and another one has the same shard
  };
  EarlierNotes notes;
  for (std::size_t rank = 0; rank < run_.placement.ranks(); ++rank) {
    const WholeRun::Copy* const copy = copy_of(rank);
    if (copy == nullptr) continue;
    std::string note;
    on_all_ranks(world_, [&] {
      if (copy->seen_by != world_.rank()) return;
      const auto bytes = records_.note_of(*copy);
      note.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    });
    notes.of_ranks.push_back(bytes_of(broadcast_text(world_, note, copy->seen_by)));
  }
  if (!own_.options.join_notes) return notes.of_ranks[world_.rank() % notes.of_ranks.size()];
  const std::vector<std::string> before = state_.trained();
  for (std::size_t unit = 0; unit < names_.size(); ++unit) {
    for (std::size_t tensor = 0; tensor < names_[unit].size(); ++tensor) {
      if (own_.plan.model().units[unit].tensors[tensor].frozen) continue;
      const auto place = std::ranges::find(before, names_[unit][tensor]) - before.begin();
      notes.places.push_back(static_cast<std::size_t>(place));
    }
  }
  return own_.options.join_notes(notes);
}

void Resharding::write(offload::RecordStore& store) {
  const HostPages memory = map_host_pages(records_under_way * store.record_bytes(), "records of a run's new ranks");
  std::array<offload::Completion, records_under_way> written;
  offload::InFlight under_way;  // ends before the memory does
  for (std::size_t record = 0; record < store.shape().tiles; ++record) {
    const std::size_t turn = record % records_under_way;
    const std::span<std::byte> bytes{memory.get() + turn * store.record_bytes(), store.record_bytes()};
    const auto [unit, tile] = own_.plan.tile_of(record);
    std::byte* const payload = store.payload(bytes).data();
    const std::size_t elements = own_.plan.layout().units[unit].tiles[tile].count;
    const TileMemory into = own_.plan.blocks().recorded(unit, tile, elements, payload);
    on_all_ranks(world_, [&] {
      written[turn].wait();
      std::ranges::fill(bytes, std::byte{0});  // padding between tensors
    });
    receive(record, into);
    on_all_ranks(world_, [&] {
      copy_seen(moves_into(record, world_.rank()), into);
      written[turn] = store.write(record, bytes);
      under_way.add(written[turn]);
    });
  }
  on_all_ranks(world_, [&] { under_way.wait(); });
}

std::vector<Resharding::Move> Resharding::moves_into(std::size_t record, std::size_t rank) const {
  const auto [unit, tile] = own_.plan.tile_of(record);
  const UnitLayout& layout = own_.plan.layout().units[unit];
  const std::size_t shard = shard_of(own_.plan.placement(), rank);
  const Range& range = layout.tiles[tile];
  std::vector<Move> moves;
  for (const TensorPart& part : tensors_in(own_.plan.model().units[unit], layout, layout.trained, shard, range)) {
    for (const RecordedState::Part& from : state_.parts_of(names_[unit][part.tensor], part.range)) {
      moves.push_back({from, part.in_shard - range.first + from.range.first - part.range.first});
    }
  }
  return moves;
}

// Copies what comes from one record, which is in memory.
void Resharding::copy(const std::vector<Move>& moves, std::pair<std::size_t, std::size_t> source, std::byte* from,
                      const TileMemory& into) const {
  const TileMemory tile = state_.tile(source.second, from);
  for (const auto& [part, begin] : moves) {
    if (std::pair(part.shard, part.record) != source) continue;
    kernels::copy_state(kernels::part(tile, part.in_tile, part.range.count),
                        kernels::part(into, begin, part.range.count));
  }
}

// Records that a rank needs and does not see: one that sees them sends them to all. Every rank knows what the others need.
void Resharding::receive(std::size_t record, const TileMemory& into) {
  for (const std::size_t rank : receivers_) {
    const std::vector<Move> moves = moves_into(record, rank);
    std::pair<std::size_t, std::size_t> last{SIZE_MAX, 0};
    for (const Move& move : moves) {
      const std::pair source(move.from.shard, move.from.record);
      if (source == last || sees(rank, move.from.shard)) continue;
      last = source;
      const WholeRun::Copy& copy_to_send = run_.nearest(move.from.shard, rank);
      std::span<std::byte> payload;
      on_all_ranks(world_, [&] {
        if (copy_to_send.seen_by == world_.rank()) {
          payload = records_.read(copy_to_send, move.from.record);
        } else {
          if (!received_) received_ = map_host_pages(state_.shape().payload_bytes, "a record of another rank");
          payload = {received_.get(), state_.shape().payload_bytes};
        }
      });
      world_.broadcast(View(payload.data(), payload.size(), DType::u8), copy_to_send.seen_by);
      if (rank == world_.rank()) copy(moves, source, payload.data(), into);
    }
  }
}

void Resharding::copy_seen(const std::vector<Move>& moves, const TileMemory& into) {
  std::pair<std::size_t, std::size_t> last{SIZE_MAX, 0};
  for (const Move& move : moves) {
    const std::pair source(move.from.shard, move.from.record);
    if (source == last || !sees(world_.rank(), move.from.shard)) continue;
    last = source;
    copy(moves, source, records_.read(run_.nearest(source.first, world_.rank()), source.second).data(), into);
  }
}

}  // namespace ballast
