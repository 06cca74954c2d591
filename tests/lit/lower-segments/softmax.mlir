// A short segment is a register: read once, no loop. A long one takes a loop a reduction, and its weights wait in the result.
// RUN: gossamer-opt %s -p 'expose-storage,lower-segments{bits=256}' --split-input-file | filecheck %s

// CHECK-LABEL: func.func @softmax(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[X:[a-z0-9]*]]: memref<?xf32>, %[[Y:[a-z0-9]*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK-COUNT-2:   scf.while
// CHECK:           scf.for %[[SEGMENT:.*]] =
// CHECK:             arith.cmpi ule, %{{.*}}, %c8
// CHECK-NEXT:        scf.if
// CHECK-NOT:           scf.for
// CHECK:               vector.maskedload %[[X]]
// CHECK:               vector.reduction <maximumf>
// CHECK-NOT:           vector.maskedload
// CHECK:               math.exp {{.*}} : vector<8xf32>
// CHECK:               vector.reduction <add>
// CHECK:               vector.maskedstore %[[Y]]
// CHECK:             } else {
// CHECK:               scf.for {{.*}} -> (vector<8xf32>)
// CHECK:                 vector.maskedload %[[X]]
// CHECK:                 arith.maximumf
// CHECK:               vector.reduction <maximumf>
// CHECK:               scf.for {{.*}} -> (vector<8xf32>)
// CHECK:                 vector.maskedload %[[X]]
// CHECK:                 math.exp
// CHECK:                 vector.maskedstore %[[Y]]
// CHECK:               vector.reduction <add>
// CHECK:               scf.for
// CHECK-NOT:             math.exp
// CHECK:                 vector.maskedload %[[Y]]
// CHECK:                 vector.maskedstore %[[Y]]
func.func @softmax(%positions: tensor<?xi32>, %x: tensor<?xf32>) -> tensor<?xf32> {
  %m = "kernel.segment_reduce"(%positions) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "max"} : (tensor<?xi32>) -> tensor<?xf32>
  %e = "kernel.segment_map"(%positions) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    %1 = "kernel.read"(%m) {map = affine_map<(s, p) -> (s)>} : (tensor<?xf32>) -> f32
    %2 = arith.subf %0, %1 : f32
    %3 = math.exp %2 : f32
    "kernel.yield"(%3) : (f32) -> ()
  }) {each = "entry"} : (tensor<?xi32>) -> tensor<?xf32>
  %t = "kernel.segment_reduce"(%positions) ({
    %0 = "kernel.read"(%e) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "add"} : (tensor<?xi32>) -> tensor<?xf32>
  %y = "kernel.segment_map"(%positions) ({
    %0 = "kernel.read"(%e) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    %1 = "kernel.read"(%t) {map = affine_map<(s, p) -> (s)>} : (tensor<?xf32>) -> f32
    %2 = arith.divf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) {each = "entry"} : (tensor<?xi32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}

// -----

// Integers; one value a segment is stored as it is.
// CHECK-LABEL: func.func @smallest(
// CHECK:         arith.constant dense<9223372036854775807> : vector<4xi64>
// CHECK:         vector.reduction <minsi>
// CHECK:         memref.store
func.func @smallest(%positions: tensor<?xi64>, %x: tensor<?xi64>) -> tensor<?xi64> {
  %m = "kernel.segment_reduce"(%positions) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xi64>) -> i64
    "kernel.yield"(%0) : (i64) -> ()
  }) {kind = "min"} : (tensor<?xi64>) -> tensor<?xi64>
  return %m : tensor<?xi64>
}
