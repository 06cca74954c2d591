// A layer norm in linalg: sums of rows and an elementwise generic become kernel.sum and kernel.map.
// RUN: gossamer-opt %s -p 'lift-rows,canonicalize' --split-input-file | filecheck %s

// CHECK-LABEL: func.func @centred(
// CHECK:         %[[SUM:.*]] = "kernel.sum"() ({
// CHECK-NEXT:      %[[IN:.*]] = "kernel.read"(%arg0) {map = #map}
// CHECK-NEXT:      "kernel.yield"(%[[IN]])
// CHECK-NEXT:    }) {size = 8 : i64} : () -> tensor<?x1xf32>
// CHECK:         "kernel.map"() ({
// CHECK-NEXT:      %[[X:.*]] = "kernel.read"(%arg0) {map = #map}
// CHECK-NEXT:      %[[S:.*]] = "kernel.read"(%[[SUM]]) {map = #map1}
// CHECK-NEXT:      arith.subf %[[X]], %[[S]] : f32
// CHECK:         }) : () -> tensor<?x8xf32>
// CHECK-NOT:     linalg.generic {indexing_maps = [#map, #map1
#M = affine_map<(d0, d1) -> (d0, d1)>
#C = affine_map<(d0, d1) -> (d0, 0)>
func.func @centred(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %t = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e1 = tensor.empty(%t) : tensor<?x1xf32>
  %init = linalg.fill ins(%zero : f32) outs(%e1 : tensor<?x1xf32>) -> tensor<?x1xf32>
  %sum = linalg.generic {indexing_maps = [#M, #C], iterator_types = ["parallel", "reduction"]}
    ins(%x : tensor<?x8xf32>) outs(%init : tensor<?x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = arith.addf %in, %out : f32
    linalg.yield %0 : f32
  } -> tensor<?x1xf32>
  %e8 = tensor.empty(%t) : tensor<?x8xf32>
  %y = linalg.generic {indexing_maps = [#M, #C, #M], iterator_types = ["parallel", "parallel"]}
    ins(%x, %sum : tensor<?x8xf32>, tensor<?x1xf32>) outs(%e8 : tensor<?x8xf32>) {
  ^bb0(%in: f32, %s: f32, %out: f32):
    %0 = arith.subf %in, %s : f32
    linalg.yield %0 : f32
  } -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// What is summed may be computed first; a reduction that is no sum, or does not start from 0, stays.
// CHECK-LABEL: func.func @kinds(
// CHECK:         "kernel.sum"() ({
// CHECK:           arith.mulf
// CHECK-NEXT:      "kernel.yield"
// CHECK:         linalg.generic
// CHECK:           arith.maximumf
#M = affine_map<(d0, d1) -> (d0, d1)>
#C = affine_map<(d0, d1) -> (d0, 0)>
func.func @kinds(%x: tensor<?x8xf32>, %i: tensor<?x1xf32>) -> (tensor<?x1xf32>, tensor<?x1xf32>) {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %t = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e1 = tensor.empty(%t) : tensor<?x1xf32>
  %init = linalg.fill ins(%zero : f32) outs(%e1 : tensor<?x1xf32>) -> tensor<?x1xf32>
  %squares = linalg.generic {indexing_maps = [#M, #C], iterator_types = ["parallel", "reduction"]}
    ins(%x : tensor<?x8xf32>) outs(%init : tensor<?x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = arith.mulf %in, %in : f32
    %1 = arith.addf %out, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<?x1xf32>
  %highest = linalg.generic {indexing_maps = [#M, #C], iterator_types = ["parallel", "reduction"]}
    ins(%x : tensor<?x8xf32>) outs(%i : tensor<?x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = arith.maximumf %in, %out : f32
    linalg.yield %0 : f32
  } -> tensor<?x1xf32>
  return %squares, %highest : tensor<?x1xf32>, tensor<?x1xf32>
}

// -----

// The greatest of a row, as torch-mlir makes it once its reshape is fused.
// CHECK-LABEL: func.func @greatest(
// CHECK:         "kernel.max"() ({
// CHECK-NEXT:      %[[IN:.*]] = "kernel.read"(%arg0) {map = #map}
// CHECK-NEXT:      %[[ABS:.*]] = math.absf %[[IN]] : f32
// CHECK-NEXT:      "kernel.yield"(%[[ABS]])
// CHECK-NEXT:    }) {size = 8 : i64} : () -> tensor<?x1xf32>
#P = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#R = affine_map<(d0, d1, d2) -> (d0, d1)>
func.func @greatest(%x: tensor<?x8xf32>) -> tensor<?x1xf32> {
  %c0 = arith.constant 0 : index
  %least = arith.constant 0xFF800000 : f32
  %t = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e1 = tensor.empty(%t) : tensor<?x1xf32>
  %init = linalg.fill ins(%least : f32) outs(%e1 : tensor<?x1xf32>) -> tensor<?x1xf32>
  %rows = tensor.expand_shape %x [[0, 1], [2]] output_shape [%t, 1, 8] : tensor<?x8xf32> into tensor<?x1x8xf32>
  %y = linalg.generic {indexing_maps = [#P, #R], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%rows : tensor<?x1x8xf32>) outs(%init : tensor<?x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = math.absf %in : f32
    %1 = arith.maximumf %0, %out : f32
    linalg.yield %1 : f32
  } -> tensor<?x1xf32>
  return %y : tensor<?x1xf32>
}

// -----

// Two greatest values of rows that start from one tensor, as a least one is that of what is negated.
// CHECK-LABEL: func.func @ends(
// CHECK:         "kernel.max"() ({
// CHECK:           arith.negf
// CHECK-NEXT:      "kernel.yield"
// CHECK:         "kernel.max"() ({
// CHECK-NEXT:      "kernel.read"(%arg0)
// CHECK-NEXT:      "kernel.yield"
// CHECK-NOT:     "reduction"
#T = affine_map<(d0) -> (d0)>
#R = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#M = affine_map<(d0, d1, d2) -> (d0, d1)>
func.func @ends(%x: tensor<?x8xf32>) -> (tensor<?x1xf32>, tensor<?x1xf32>) {
  %c0 = arith.constant 0 : index
  %lowest = arith.constant 0xFF800000 : f32
  %t = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%t) : tensor<?xf32>
  %filled = linalg.generic {indexing_maps = [#T], iterator_types = ["parallel"]} outs(%e : tensor<?xf32>) {
  ^bb0(%out: f32):
    linalg.yield %lowest : f32
  } -> tensor<?xf32>
  %rows = tensor.expand_shape %x [[0, 1], [2]] output_shape [%t, 1, 8] : tensor<?x8xf32> into tensor<?x1x8xf32>
  %init = tensor.expand_shape %filled [[0, 1]] output_shape [%t, 1] : tensor<?xf32> into tensor<?x1xf32>
  %least = linalg.generic {indexing_maps = [#R, #M], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%rows : tensor<?x1x8xf32>) outs(%init : tensor<?x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = arith.negf %in : f32
    %1 = arith.maximumf %0, %out : f32
    linalg.yield %1 : f32
  } -> tensor<?x1xf32>
  %greatest = linalg.generic {indexing_maps = [#R, #M], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%rows : tensor<?x1x8xf32>) outs(%init : tensor<?x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = arith.maximumf %in, %out : f32
    linalg.yield %0 : f32
  } -> tensor<?x1xf32>
  return %least, %greatest : tensor<?x1xf32>, tensor<?x1xf32>
}
