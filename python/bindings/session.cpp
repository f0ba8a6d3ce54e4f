#include "python/bindings/session.h"

namespace ballast::python {
namespace {

TrainingOptions training_options(const SessionOptions& asked) {
  TrainingOptions options{
      .stage = asked.stage,
      .parameters = asked.parameters,
      .gradients = asked.gradients,
      .state = asked.state,
      .drives = {.directories = {asked.directories.begin(), asked.directories.end()}, .run = asked.run},
      .format = asked.format,
      .schedule = {.update_in_backward = asked.update_in_backward},
      .keeps_timeline = asked.keeps_timeline,
      .verify = asked.verify,
      .threads = asked.threads,
      .gpu = asked.gpu,
      .stream = reinterpret_cast<StreamHandle>(asked.stream)};
  if (asked.tile_elements > 0) options.tile_elements = asked.tile_elements;
  for (const std::size_t unit : asked.backward_order)
    options.trace.push_back({unit, Phase::backward});
  return options;
}

Slots::Agree throwing_own_after(const Session::AgreeOnRoom& agree) {
  return [&agree](const std::exception_ptr& failure) {
    agree(failure != nullptr);
    if (failure) std::rethrow_exception(failure);
  };
}

}  // namespace

Session::Session(Model model, py::object group, py::object norm_group, std::vector<optim::Rule> rules,
                 const SessionOptions& options)
    : group_(std::move(group)), norm_group_(std::move(norm_group)), gpu_(options.gpu) {
  for (const py::object& group : {group_, norm_group_}) {
    if (!group.is_none()) groups_.push_back(&group.cast<Group&>());
  }
  Communicator& world = groups_.front()->communicator();
  TrainingOptions with_group = training_options(options);
  with_group.drives.log = &log_;
  if (groups_.size() > 1) with_group.norm_group = &groups_.back()->communicator();
  const py::gil_scoped_release released;
  training_.emplace(std::move(model), world, std::move(rules), with_group);
}

std::vector<std::pair<Level, std::string>> Session::take_log() {
  const std::lock_guard lock(log_mutex_);
  return std::exchange(lines_, {});
}

// `fill` takes Python's lock itself.
void Session::start(const Fill& fill) {
  const py::gil_scoped_release released;
  training_->start([&](std::size_t unit, std::size_t tensor, Range range, const View& to) {
    fill(unit, tensor, range.first, range.count, reinterpret_cast<std::uintptr_t>(to.data()));
  });
  count_steps();
}

void Session::count_steps() const {
  for (const Group* group : groups_) {
    group->count_steps(training_->steps());
  }
}

void Session::continue_from(std::uint64_t steps) {
  training_->engine().continue_from(steps);
  count_steps();
}

std::vector<std::size_t> Session::tensor_begins(std::size_t unit) const {
  return training_->plan().layout().units.at(unit).tensor_begin;
}

Memory Session::full_parameters(std::size_t unit) {
  const View whole = training_->engine().full_parameters(unit);
  return {whole.data(), whole.bytes(), gpu_, {}};
}

Memory Session::lend_parameters(std::size_t unit) {
  const py::gil_scoped_release released;
  lease_.emplace(training_->forward(unit));
  const ConstView lent = lease_->parameters();
  return {const_cast<std::byte*>(lent.data()), lent.bytes(), gpu_, {}};  // torch has no tensors that can only be read
}

Memory Session::lend_gradients(std::size_t unit) {
  const py::gil_scoped_release released;
  lease_.emplace(training_->backward(unit));
  const View lent = lease_->gradients();
  return {lent.data(), lent.bytes(), gpu_, {}};
}

void Session::give_back() {
  const py::gil_scoped_release released;
  lease_.reset();
}

void Session::prepare(const std::vector<optim::Rule>& rules, const std::vector<std::uint64_t>& begun_at) {
  const py::gil_scoped_release released;
  training_->engine().prepare({.groups = rules, .begun_at = begun_at});
}

double Session::gradient_norm(double loss_scale) {
  const py::gil_scoped_release released;
  return training_->engine().gradient_norm(loss_scale);
}

std::vector<std::vector<double>> Session::tensor_norms(double loss_scale) {
  const py::gil_scoped_release released;
  return training_->engine().tensor_norms(loss_scale);
}

std::vector<TileToUpdate> Session::shown(std::span<const SummedTile> tiles) const {
  std::vector<TileToUpdate> shown;
  shown.reserve(tiles.size());
  const auto memory = [&](const View& view, bool on_gpu) {
    return Memory{view.data(), view.bytes(), on_gpu ? gpu_ : std::nullopt, {}};
  };
  for (const SummedTile& tile : tiles) {
    shown.push_back({tile.unit, tile.range.first, memory(tile.gradients, tile.gradients_on_gpu),
                     memory(tile.masters, tile.masters_on_gpu)});
  }
  return shown;
}

// What Python raises in the optimizer's own step comes out here, the first time; later calls can only tell of it.
StepResult Session::step(const StepAsked& asked) {
  const py::gil_scoped_release released;
  std::exception_ptr raised;
  const auto own_step = [&](std::span<const SummedTile> tiles, float gradient_factor) {
    try {
      asked.own_step(shown(tiles), gradient_factor);
    } catch (const std::exception& error) {
      raised = std::current_exception();
      fail(Code::bad_argument, {.what = std::string("the optimizer's own step has failed: ") + error.what()});
    }
  };
  try {
    StepResult result =
        training_->engine().step({.groups = asked.rules,
                                  .max_norm = asked.max_norm,
                                  .loss_scale = asked.loss_scale,
                                  .discard = asked.discard,
                                  .begun_at = asked.begun_at,
                                  .update = asked.own_step ? TrainerUpdate(own_step) : TrainerUpdate()});
    count_steps();
    return result;
  } catch (const Error&) {
    if (raised) std::rethrow_exception(raised);
    throw;
  }
}

StepResult Session::step_as_prepared() {
  const py::gil_scoped_release released;
  StepResult result = training_->engine().step();
  count_steps();
  return result;
}

void Session::finish() {
  const py::gil_scoped_release released;
  training_->engine().finish();
}

void Session::leave_device(bool parameters, const AgreeOnRoom& agree) {
  const py::gil_scoped_release released;
  training_->engine().leave_device(parameters, throwing_own_after(agree));
}

void Session::return_to_device(const AgreeOnRoom& agree) {
  const py::gil_scoped_release released;
  training_->engine().return_to_device(throwing_own_after(agree));
}

void Session::parameters_changed() {
  const py::gil_scoped_release released;
  training_->engine().parameters_changed();
}

std::string Session::ledger(const std::pair<Tier, std::size_t>& own_state) const {
  Ledger ledger = training_->ledger();
  if (own_state.second > 0) ledger.push_back({own_state.first, "own state", own_state.second});
  return to_text(ledger);
}

std::string Session::chrome_trace() {
  finish();
  return training_->chrome_trace();
}

// The tensors' parts in a tile, and where those begin in it.
template <class Visit>
void Session::each_part(const LocalTile& tile, Visit&& visit) const {
  const UnitLayout& layout = training_->plan().layout().units[tile.unit];
  const Section& section = tile.frozen ? layout.frozen : layout.trained;
  const std::size_t first = tile.range.first - section.of_rank(rank_in_shard_group()).first;
  for (const TensorPart& part : tensors_in(training_->model().units[tile.unit], layout, section, rank_in_shard_group(),
                                           {first, tile.range.count})) {
    visit(part.tensor, part.range, part.in_shard - first);
  }
}

Session::Parts Session::parts(std::size_t unit, std::size_t tensor) const {
  const Unit& model = training_->model().units.at(unit);
  const UnitLayout& layout = training_->plan().layout().units[unit];
  Parts parts;
  for (const TensorPart& part : owners_of(model, layout, tensor, {0, model.tensors.at(tensor).elements()})) {
    if (part.rank == rank_in_shard_group()) parts.emplace_back(part.range.first, part.range.count);
  }
  return parts;
}

void Session::read_moment(std::size_t unit, std::size_t tensor, kernels::Moment moment, std::uintptr_t into) {
  const py::gil_scoped_release released;
  std::vector<float> numbers;
  const auto each_part_of_it = [&](const LocalTile& tile, auto&& visit) {
    if (tile.unit != unit || tile.frozen) return;
    each_part(tile, [&](std::size_t found, const Range& range, std::size_t in_tile) {
      if (found == tensor) visit(range, in_tile);
    });
  };
  training_->engine().look_at_state(
      [&](const LocalTile& tile) {
        numbers.resize(tile.memory.count);
        kernels::read_moment(tile.memory, moment, numbers);
        each_part_of_it(tile, [&](const Range& range, std::size_t in_tile) {
          std::copy_n(numbers.data() + in_tile, range.count, reinterpret_cast<float*>(into) + range.first);
        });
      },
      [&](const LocalTile& tile) {  // others may be on drives
        bool has_some = false;
        each_part_of_it(tile, [&](const Range&, std::size_t) { has_some = true; });
        return has_some;
      });
}

void Session::write_moments(const MomentAddress& address) {
  const py::gil_scoped_release released;
  std::vector<float> numbers;
  training_->engine().change_state([&](const LocalTile& tile) {
    for (const kernels::Moment moment : {kernels::Moment::momentum, kernels::Moment::variance}) {
      if ((moment == kernels::Moment::momentum ? tile.memory.momentum : tile.memory.variance) == nullptr) continue;
      numbers.resize(tile.memory.count);
      kernels::read_moment(tile.memory, moment, numbers);
      each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
        const std::uintptr_t from = address(tile.unit, tensor, moment);
        if (from == 0) return;
        std::copy_n(reinterpret_cast<const float*>(from) + range.first, range.count, numbers.data() + in_tile);
      });
      kernels::write_moment(tile.memory, moment, numbers);
    }
  });
}

ChunkKind Session::kind(std::size_t unit) const {
  std::byte anywhere{};
  return kind_of(training_->plan().blocks().state(unit).tile(&anywhere), false);
}

std::vector<StatePart> Session::own_parts() const {
  std::vector<StatePart> parts;
  for (const LocalTile& tile : training_->engine().local_tiles()) {
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t) {
      parts.push_back({tile.unit, tensor, range.first, tile.frozen, {.count = range.count}});
    });
  }
  return parts;
}

// `look` takes Python's lock itself.
void Session::look_at_parts(const PartLook& look) {
  const py::gil_scoped_release released;
  training_->engine().look_at_state([&](const LocalTile& tile) { each_state_part(tile, look); });
}

void Session::change_parts(const PartLook& change, const std::function<void()>& agree) {
  const py::gil_scoped_release released;
  training_->engine().change_state([&](const LocalTile& tile) { each_state_part(tile, change); }, agree);
}

void Session::each_state_part(const LocalTile& tile, const PartLook& look) const {
  each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
    look({tile.unit, tensor, range.first, tile.frozen, kernels::part(tile.memory, in_tile, range.count)});
  });
}

void Session::write_parameters(const Fill& fill) {
  const py::gil_scoped_release released;
  const auto backend = kernels::cpu_backend({.threads = 1});
  training_->engine().change_state([&](const LocalTile& tile) {
    const std::size_t width = byte_size(tile.memory.parameter_dtype);
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
      std::byte* const into = tile.memory.parameter + in_tile * width;
      const bool is_new = fill(tile.unit, tensor, range.first, range.count, reinterpret_cast<std::uintptr_t>(into));
      if (is_new && !tile.frozen) kernels::begin_master(kernels::part(tile.memory, in_tile, range.count), *backend);
    });
  });
}

void Session::take_full_parameters(const std::set<std::pair<std::size_t, std::size_t>>& written) {
  const py::gil_scoped_release released;
  const auto backend = kernels::cpu_backend({.threads = 1});
  training_->engine().change_state([&](const LocalTile& tile) {
    const View part = training_->engine().full_parameters(tile.unit).part(tile.range.first, tile.range.count);
    training_->engine().read_memory(part, tile.memory.parameter);
    if (tile.frozen) return;
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
      if (!written.contains({tile.unit, tensor})) return;
      kernels::begin_master(kernels::part(tile.memory, in_tile, range.count), *backend);
    });
  });
}

}  // namespace ballast::python
