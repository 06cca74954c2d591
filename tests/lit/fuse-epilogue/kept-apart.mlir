// What stays outside of a kernel.contract, or never becomes one.
// RUN: gossamer-opt %s -p fuse-epilogue --split-input-file | filecheck %s

// What something else than the end of the function reads, besides elementwise work, has to exist in memory: fusion ends there.
// CHECK-LABEL: func.func @second_user(
// CHECK:         %[[S:.*]] = "kernel.contract"
// CHECK:           "kernel.yield"
// CHECK:         %[[T:.*]] = linalg.generic {{.*}} ins(%[[S]] :
// CHECK:           math.tanh
// CHECK:         return %[[T]], %{{.*}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @second_user(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> (tensor<?x4xf32>, tensor<?xf32>) {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  %0 = linalg.generic {indexing_maps = [#tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%xw : tensor<?x4xf32>) outs(%e : tensor<?x4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %v = math.tanh %a : f32
    linalg.yield %v : f32
  } -> tensor<?x4xf32>
  %flat = tensor.collapse_shape %xw [[0, 1]] : tensor<?x4xf32> into tensor<?xf32>
  return %0, %flat : tensor<?x4xf32>, tensor<?xf32>
}

// -----

// Read in another order, the result has to exist in memory.
// CHECK-LABEL: func.func @turned(
// CHECK:         "kernel.contract"
// CHECK:         linalg.generic
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @turned(%x: tensor<4x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<4x4xf32> {
  %init = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<4x4xf32>) -> tensor<4x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<4x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<4x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %y = linalg.generic {indexing_maps = [affine_map<(t, m) -> (m, t)>, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%xw : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %v = math.tanh %a : f32
    linalg.yield %v : f32
  } -> tensor<4x4xf32>
  return %y : tensor<4x4xf32>
}

// -----

// An epilogue that reads a second sparse tensor is left alone.
// CHECK-LABEL: func.func @sparse_operand(
// CHECK:         "kernel.contract"
// CHECK:         linalg.generic
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @sparse_operand(%x: tensor<4x8xf32>, %w: tensor<4x8xf32, #CSR>, %mask: tensor<4x4xf32, #CSR>) -> tensor<4x4xf32> {
  %init = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<4x4xf32>) -> tensor<4x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<4x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<4x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %y = linalg.generic {indexing_maps = [#tm, #tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%xw, %mask : tensor<4x4xf32>, tensor<4x4xf32, #CSR>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %v = arith.mulf %a, %b : f32
    linalg.yield %v : f32
  } -> tensor<4x4xf32>
  return %y : tensor<4x4xf32>
}

// -----

// So is one that asks where it is.
// CHECK-LABEL: func.func @position(
// CHECK:         "kernel.contract"
// CHECK:         linalg.index
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @position(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  %y = linalg.generic {indexing_maps = [#tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%xw : tensor<?x4xf32>) outs(%e : tensor<?x4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %i = linalg.index 1 : index
    %j = arith.index_cast %i : index to i32
    %k = arith.sitofp %j : i32 to f32
    %v = arith.addf %a, %k : f32
    linalg.yield %v : f32
  } -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// A dense product is none of our business.
// CHECK-LABEL: func.func @dense(
// CHECK-NOT:     kernel.contract
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @dense(%x: tensor<?x8xf32>, %w: tensor<4x8xf32>) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  return %xw : tensor<?x4xf32>
}

// -----

// A sum that does not start from zero is left alone.
// CHECK-LABEL: func.func @from_one(
// CHECK-NOT:     kernel.contract
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @from_one(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %init = arith.constant 1.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  return %xw : tensor<?x4xf32>
}

// -----

// So is one that starts from a tensor of the caller.
// CHECK-LABEL: func.func @accumulating(
// CHECK-NOT:     kernel.contract
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @accumulating(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>, %start: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  return %xw : tensor<?x4xf32>
}

// -----

// A reduction of something else than products is no contraction: here the largest product of each row.
// CHECK-LABEL: func.func @largest(
// CHECK-NOT:     kernel.contract
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @largest(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.maximumf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  return %xw : tensor<?x4xf32>
}
