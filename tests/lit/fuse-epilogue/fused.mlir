// What becomes part of a kernel.contract.
// RUN: gossamer-opt %s -p fuse-epilogue --split-input-file | filecheck %s

// The product alone: the epilogue passes the sum on.
// CHECK-LABEL: func.func @product(
// CHECK:         %[[Y:.*]] = "kernel.contract"(%arg0, %arg1) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      "kernel.yield"(%[[SUM]]) : (f32) -> ()
// CHECK-NEXT:    }) {indexing_maps = [#[[TK:.*]], #[[MK:.*]]]} : (tensor<?x8xf32>, tensor<4x8xf32, #sparse>) -> tensor<?x4xf32>
// CHECK-NEXT:    return %[[Y]]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @product(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
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
  return %xw : tensor<?x4xf32>
}

// -----

// Bias and relu. The bias is read by the feature, constants stay outside.
// CHECK:       #[[M:.*]] = affine_map<(d0, d1) -> (d1)>
// CHECK-LABEL: func.func @bias_relu(
// CHECK-DAG:     %[[ZERO:.*]] = arith.constant 0.000000e+00 : f32
// CHECK:         "kernel.contract"(%arg0, %arg1) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      %[[B:.*]] = "kernel.read"(%arg2) {map = #[[M]]} : (tensor<4xf32>) -> f32
// CHECK-NEXT:      %[[S:.*]] = arith.addf %[[SUM]], %[[B]] : f32
// CHECK-NEXT:      %[[R:.*]] = arith.maximumf %[[S]], %[[ZERO]] : f32
// CHECK-NEXT:      "kernel.yield"(%[[R]]) : (f32) -> ()
// CHECK-NOT:     linalg.generic
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @bias_relu(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>, %bias: tensor<4xf32>) -> tensor<?x4xf32> {
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
  %y = linalg.generic {indexing_maps = [#tm, affine_map<(t, m) -> (m)>, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%xw, %bias : tensor<?x4xf32>, tensor<4xf32>) outs(%e : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %s = arith.addf %a, %b : f32
    %r = arith.maximumf %s, %init : f32
    linalg.yield %r : f32
  } -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// A chain: each link reads what the one before has computed, and may read it twice.
// CHECK-LABEL: func.func @chain(
// CHECK:         "kernel.contract"(%arg0, %arg1) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      %[[T:.*]] = math.tanh %[[SUM]] : f32
// CHECK-NEXT:      %[[S:.*]] = arith.mulf %[[T]], %[[T]] : f32
// CHECK-NEXT:      %[[R:.*]] = "kernel.read"(%arg2) {{.*}} : (tensor<?x4xf32>) -> f32
// CHECK-NEXT:      %[[Y:.*]] = arith.addf %[[R]], %[[S]] : f32
// CHECK-NEXT:      "kernel.yield"(%[[Y]])
// CHECK-NOT:     linalg.generic
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @chain(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>, %r: tensor<?x4xf32>) -> tensor<?x4xf32> {
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
  %1 = linalg.generic {indexing_maps = [#tm, #tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%0, %0 : tensor<?x4xf32>, tensor<?x4xf32>) outs(%e : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %v = arith.mulf %a, %b : f32
    linalg.yield %v : f32
  } -> tensor<?x4xf32>
  %y = linalg.generic {indexing_maps = [#tm, #tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%r, %1 : tensor<?x4xf32>, tensor<?x4xf32>) outs(%e : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %v = arith.addf %a, %b : f32
    linalg.yield %v : f32
  } -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// The weight stored as [K, M]: only its map says so.
// CHECK:       #[[KM:.*]] = affine_map<(d0, d1, d2) -> (d2, d1)>
// CHECK-LABEL: func.func @stored_transposed(
// CHECK:         "kernel.contract"(%arg0, %arg1)
// CHECK:         indexing_maps = [#{{.*}}, #[[KM]]]} : (tensor<?x8xf32>, tensor<8x4xf32, #sparse>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @stored_transposed(%x: tensor<?x8xf32>, %w: tensor<8x4xf32, #CSR>) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, affine_map<(t, m, k) -> (k, m)>, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<8x4xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  return %xw : tensor<?x4xf32>
}

// -----

// bf16 factors, products summed in f32: the sum is f32, the cast to the result is part of the epilogue.
// CHECK-LABEL: func.func @narrow(
// CHECK:         "kernel.contract"(%arg0, %arg1) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      %[[Y:.*]] = arith.truncf %[[SUM]] : f32 to bf16
// CHECK-NEXT:      "kernel.yield"(%[[Y]]) : (bf16) -> ()
// CHECK-NEXT:    }) {{.*}} : (tensor<?x8xbf16>, tensor<4x8xbf16, #sparse>) -> tensor<?x4xbf16>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @narrow(%x: tensor<?x8xbf16>, %w: tensor<4x8xbf16, #CSR>) -> tensor<?x4xbf16> {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xbf16>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xbf16>, tensor<4x8xbf16, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: bf16, %b: bf16, %o: f32):
    %a32 = arith.extf %a : bf16 to f32
    %b32 = arith.extf %b : bf16 to f32
    %p = arith.mulf %a32, %b32 : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  %e16 = tensor.empty(%tokens) : tensor<?x4xbf16>
  %y = linalg.generic {indexing_maps = [#tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%xw : tensor<?x4xf32>) outs(%e16 : tensor<?x4xbf16>) {
  ^bb0(%a: f32, %o: bf16):
    %v = arith.truncf %a : f32 to bf16
    linalg.yield %v : bf16
  } -> tensor<?x4xbf16>
  return %y : tensor<?x4xbf16>
}
